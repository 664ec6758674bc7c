"""Headless Chromium, the one of the system: a page, every request that it makes, and every complaint on its console."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

_QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")

_LIMIT_MS = 120_000


@dataclass
class Tab:
    page: Any
    requested: list[str] = field(default_factory=list)
    """Addresses asked for, whether or not anything answered."""
    reached: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings on the console, and exceptions that nobody caught."""


class Browser:
    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    @contextlib.contextmanager
    def tab(self, width: int = 1280, height: int = 900, color_scheme: str = "light") -> Iterator[Tab]:
        """A page that shares nothing with other tabs."""
        context = self._chromium.new_context(viewport={"width": width, "height": height}, color_scheme=color_scheme)
        context.set_default_timeout(_LIMIT_MS)
        page = context.new_page()
        tab = Tab(page)
        page.on("request", lambda request: tab.requested.append(request.url))
        page.on("requestfinished", lambda request: tab.reached.append(request.url))
        page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        page.on(
            "console",
            lambda message: tab.complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        try:
            yield tab
        finally:
            context.close()


@contextlib.contextmanager
def launch() -> Iterator[Browser]:
    """Skips the test where there is no chromium."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, headless=True, args=list(_QUIET))
        yield Browser(chromium)
        chromium.close()
