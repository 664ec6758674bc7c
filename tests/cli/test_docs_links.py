"""Every link of the documentation that stays in the repository leads to a file, and to a heading that it has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

import tracekern
from tests.paths import ROOT

PAGES = [
    ROOT / name
    for name in subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, text=True
    ).split()
]
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")


def text_of(page: Path) -> str:
    """The page without its code blocks: what looks like a link there is code."""
    return re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Of the page's headings, by GitHub's rule: lower case, punctuation dropped, a hyphen for each space."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> Iterator[str]:
    for target, anchor in LINK.findall(text_of(page)):
        file = (page.parent / unquote(target)).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield f"{page}: {target}#{anchor}"


def test_links_lead_somewhere():
    assert [link for page in PAGES for link in dead_links(page)] == []


def test_every_page_can_be_reached_from_the_readme():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        linked = {
            (page.parent / unquote(target)).resolve()
            for target, _ in LINK.findall(text_of(page))
            if target.endswith(".md")
        }
        new |= linked - reached
    assert set((ROOT / "docs").glob("*.md")) <= reached


@pytest.mark.rotates
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    """Strict: a page that no list names, a dead link and a name without a docstring end the build."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("INFO")] == []
    reference = (tmp_path / "site" / "api.html").read_text("utf-8")
    assert [
        name for name in tracekern.__all__ if f'id="tracekern.{name}"' not in reference and f'.{name}"' not in reference
    ] == []
    loaded = [
        found
        for page in (tmp_path / "site").glob("*.html")
        for found in re.findall(r'(?:src|<link[^>]*href)="(https?:[^"]*)', page.read_text("utf-8"))
    ]
    assert loaded == []


def test_every_page_is_on_the_site():
    listed = set(re.findall(r"(\w+\.md)", (ROOT / "mkdocs.yml").read_text("utf-8")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= listed
