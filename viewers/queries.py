"""The questions that come with tracekern as SQL, for Perfetto's query page and omnibox."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "sql"
_FIRST = "tk_wait"
"""The others build on its views."""


def names() -> list[str]:
    """Returns the names of the views that answer a question, each in its own file."""
    return [_FIRST, *sorted(path.stem for path in FOLDER.glob("*.sql") if path.stem != _FIRST)]


def definitions() -> str:
    """What creates all views. A file ends with the query that shows its view; that is left out."""
    return "".join(_split(FOLDER / f"{name}.sql")[0] for name in names())


def query(name: str) -> str:
    """The query that shows the view `name`."""
    return _split(FOLDER / f"{name}.sql")[1]


def _split(path: Path) -> tuple[str, str]:
    """(definitions without comments, query)"""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("--")]
    text = "\n".join(lines).strip()
    place = text.rindex("\n\nselect ")
    return text[:place].strip() + "\n", text[place:].strip()
