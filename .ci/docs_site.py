"""For mkdocs: README and CHANGELOG become pages, and links to files outside docs lead into the checkout.

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
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_relink((ROOT / source).read_text("utf-8"), folder="")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown if page.file.src_uri in PAGES.values() else _relink(markdown, folder="docs")


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
