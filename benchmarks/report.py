"""How long does the page of `tracekern report` take to make and to open?

    python benchmarks/report.py
    python benchmarks/report.py --spans 4

A synthetic Timeline (analysis_timeline.py) of 1 M spans. The page is opened in headless Chromium, each time in a
process of its own that has nothing in its caches. Open means that the figures at the top, those that are drawn before
the reader scrolls, are painted, counted from the start of the navigation on the browser's own clock; then all others
are drawn too, as for printing. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from analysis_timeline import make_timeline
from harness import Table, write_results

MAX_OPEN_S = 3.0
MAX_PAGE_BYTES = 8_000_000
VIEW = {"width": 1280, "height": 900}
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")

_AT_THE_TOP = """[...document.querySelectorAll('.figure')].filter((figure) =>
    figure.clientWidth && figure.getBoundingClientRect().top < innerHeight + 600)"""
_ALL = "[...document.querySelectorAll('.figure')].filter((figure) => figure.clientWidth)"
_DRAWN_AT = """() => new Promise((resolve) => { const look = () => {
    const figures = %s;
    const isDrawn = (figure) => figure.querySelector('.main-svg .trace, .main-svg .hm');
    const drawn = document.readyState !== 'loading' && figures.length && figures.every(isDrawn);
    requestAnimationFrame(drawn ? () => resolve(performance.now()) : look); }; look(); })"""
"""ms since the start of the navigation, in the frame after the one in which the last of the figures was there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=float, default=1.05, help="in M")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="tracekern-report-") as directory:
        page = Path(directory) / "report.html"
        made = make_page(round(arguments.spans * 1e6), page)
        opened = [open_page(page) for _ in range(arguments.rounds)]
    text, first, every = (statistics.median(one[key] for one in opened) for key in ("text_s", "first_s", "all_s"))
    table = Table(
        f"the page of {made['spans'] / 1e6:.2f} M spans, median of {len(opened)}", ["what", "", "at most", "met"]
    )
    table.add("analysis and page, wall", f"{made['wall_s']:.1f} s", "", "")
    table.add(
        "size", f"{made['bytes'] / 1e6:.1f} MB", f"{MAX_PAGE_BYTES / 1e6:g} MB", met(made["bytes"] <= MAX_PAGE_BYTES)
    )
    table.add("until the text is painted", f"{text:.2f} s", "", "")
    table.add("until the first figures are painted", f"{first:.2f} s", f"{MAX_OPEN_S:g} s", met(first <= MAX_OPEN_S))
    table.add("until all figures are painted", f"{every:.2f} s", "", "")
    table.print()
    is_met = first <= MAX_OPEN_S and made["bytes"] <= MAX_PAGE_BYTES
    medians = {"text_s": text, "first_s": first, "all_s": every}
    results = {"load_before": load_before, "page": made, "opened": opened, **medians}
    write_results("report", {**results, "max_open_s": MAX_OPEN_S, "met": is_met})
    sys.exit(0 if is_met else 1)


def met(is_met: bool) -> str:
    return "yes" if is_met else "NO"


def make_page(num_spans: int, path: Path) -> dict[str, Any]:
    from tracekern.analysis.findings import analyze
    from tracekern.viewers.report.report_page import report_page

    timeline = make_timeline(num_spans)
    started = time.perf_counter()
    text = report_page(analyze(timeline), "benchmark", "synthetic", "tracekern open trace.pftrace.gz")
    path.write_text(text, encoding="utf-8")
    return {"spans": len(timeline.spans), "wall_s": time.perf_counter() - started, "bytes": path.stat().st_size}


def open_page(path: Path) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        sys.exit("no chromium on this machine (apt-get install chromium)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, headless=True, args=list(_FLAGS))
        page = chromium.new_page(viewport=VIEW)
        page.goto(path.as_uri(), wait_until="commit")
        first_ms = page.evaluate(_DRAWN_AT % _AT_THE_TOP)
        text_ms = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
        figures = page.evaluate(f"() => {_AT_THE_TOP}.length")
        page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
        all_ms = page.evaluate(_DRAWN_AT % _ALL)
        version = chromium.version
        chromium.close()
    seconds = {"text_s": text_ms / 1e3, "first_s": first_ms / 1e3, "all_s": all_ms / 1e3}
    return {"chromium": version, "figures_at_the_top": figures, **seconds}


if __name__ == "__main__":
    main()
