"""A copy of csrc as if nobody had ever traced it: no macro, no recorder, not even as a parameter of a function."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

MACRO = re.compile(r"\bTK_(?:RANGE|WAIT|SIGNAL|END|END_IF|END_AFTER|MARK|NEXT|SEQUENCE)\(")
FUNCTION = re.compile(r"template <([^>\n]*)>\n((?:static |inline )*TK_DEVICE [^;{]*\{)")


def without_macros(text: str) -> str:
    """Statements that a macro makes, parentheses balanced, go."""
    while match := MACRO.search(text):
        depth, at = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        assert text[at] == ";", f"a macro is a statement of its own: {text[match.start() : at + 1]}"
        text = text[: match.start()] + text[at + 1 :]
    return text


def _without_parameter(match: re.Match[str]) -> str:
    template, function = match.groups()
    if "Rec& recorder" not in function:
        return match.group()
    kept = [word for word in template.split(", ") if word != "class Rec"]
    header = f"template <{', '.join(kept)}>\n" if kept else ""
    return header + re.sub(r",\s*Rec& recorder", "", function)


def stripped(text: str) -> str:
    text = re.sub(r"\bTK_END_AFTER_BARRIER\((\w+)\);", r"\1.block_sync();", text)
    text = without_macros(text)
    text = re.sub(r"\bRec recorder\([^;]*\);", "", text)
    text = FUNCTION.sub(_without_parameter, text)
    return re.sub(r",\s*recorder\b(?=\s*[,)])", "", text)


def copy_stripped(csrc: Path, copy: Path) -> Path:
    """Copies csrc and strips all but the recorder itself. Returns `copy`."""
    shutil.copytree(csrc, copy)
    for part in ("comm", "moe"):
        for path in (copy / part).rglob("*.*"):
            text = stripped(path.read_text())
            left = re.search(r"\brecorder\b(?!\.h\")", re.sub(r"//[^\n]*", "", text))
            assert left is None, f"{path.name}: {text[max(0, left.start() - 80) : left.end() + 40]}"
            path.write_text(text)
    return copy
