"""For mkdocs: README and CHANGELOG become pages, links to files outside docs lead into the checkout, and the tables of
the API get the docstrings behind them.

The site is built into build/docs, so a file of the repository is two folders up from every page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
_API_ROW = re.compile(r"^\| `(tracekern[\w.]+)` \| (.*?) \|")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_relink((ROOT / source).read_text("utf-8"), folder="")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "api.md":
        markdown = "\n\n".join(map(_with_docstrings, markdown.split("\n\n")))
    return markdown if page.file.src_uri in PAGES.values() else _relink(markdown, folder="docs")


def _with_docstrings(block: str) -> str:
    """A table of the API with what mkdocstrings takes for its rows behind it; any other block as it is."""
    rows = [found for line in block.splitlines() if (found := _API_ROW.match(line))]
    members = "\n    options:\n      members: [{}]"
    shown = (f"::: {row[1]}" + (members.format(row[2].replace("`", "")) if row[2] else "") for row in rows)
    return "\n".join([block, "", *shown])


def _relink(markdown: str, folder: str) -> str:
    """The page with its links, which are relative to `folder` of the repository, as the site needs them."""

    def replace(found: re.Match[str]) -> str:
        image, text, target, anchor = found[1], found[2], posixpath.normpath(posixpath.join(folder, found[3])), found[4]
        inside = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
        if inside:
            return f"{image}[{text}]({inside}{anchor or ''})"
        label = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
        return f'<a href="../../{target}">{label}</a>'

    return _LINK.sub(replace, markdown)
