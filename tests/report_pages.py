"""What a report page shows: its figures as data, and as a browser draws them."""

from __future__ import annotations

import json
import re
from pathlib import Path


def figures_of(page: Path) -> list[dict]:
    text = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(), re.DOTALL)[1]
    return json.loads(text)


FIGURES = """[...document.querySelectorAll('.figure')].filter((e) => e.clientWidth).map((e) => ({
    name: e.getAttribute('aria-label'),
    shapes: [...e.querySelectorAll('.trace path, .hm image')].map((s) => s.getBoundingClientRect())
        .filter((box) => box.width > 0.5 || box.height > 0.5).length,
    cut: [...e.querySelectorAll('text')].filter((text) => {
        const [inner, outer] = [text.getBoundingClientRect(), e.getBoundingClientRect()];
        return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1);
    }).map((text) => text.textContent),
    overflow: (e.querySelector('.main-svg') || e).getBoundingClientRect().right - document.documentElement.clientWidth,
}))"""


def look_at(page) -> list[dict]:
    """The figures, after going from one to the next as a reader does: they are drawn when they come into view."""
    page.evaluate("""async () => {
        for (const figure of [...document.querySelectorAll('.figure')].filter((e) => e.clientWidth)) {
            figure.scrollIntoView();
            while (!figure.querySelector('.main-svg')) await new Promise((done) => setTimeout(done, 20));
        }
    }""")
    page.wait_for_function(f"() => {FIGURES}.every((figure) => figure.shapes > 0)")
    return page.evaluate(f"() => {FIGURES}")
