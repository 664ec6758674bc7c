"""The table of docs/analysis.md: what was planted in the kept captures, and what their reports say."""

from __future__ import annotations

import re

import pytest

from tests.paths import ROOT, TRACES
from tracekern.analysis.findings import analyze
from tracekern.timeline.load import load
from tracekern.viewers.report.headlines import headlines

_PAGE = (ROOT / "docs" / "analysis.md").read_text()
_TABLE = _PAGE.partition("| capture | planted | named | cost | why nobody is named |\n")[2].partition("\n\n")[0]
ROWS = {row[0].strip("`"): row[1:] for row in (re.split(r" *\| *", line)[1:-1] for line in _TABLE.splitlines()[1:])}


def test_the_table_has_every_capture():
    assert sorted(ROWS) == sorted({dump.parent.name for dump in TRACES.glob("*/rank_*.tkdump")})


@pytest.mark.parametrize("name", ROWS)
def test_a_kept_capture_is_reported_as_the_table_says(name: str):
    planted, named, cost, why_nobody = ROWS[name]
    late = re.search(r"--late-(rank|proxy)\s+(\d+)\s+--late-us\s+(\d+)", (TRACES / name / "README.md").read_text())
    whose = "proxy of " if late and late[1] == "proxy" else ""
    assert planted == (f"{whose}rank {late[2]}, {late[3]} us" if late else "nothing")
    lines = {line.word: line.text for line in headlines(analyze(load(TRACES / name)))}
    verdict, said = lines["verdict"], f"{lines['verdict']} {lines.get('why', '')}"
    assert (named == "nobody") == verdict.startswith(("No cause is named", "One rank")) == bool(why_nobody)
    assert verdict.startswith(named) or named == "nobody"
    assert cost in said
    assert why_nobody in verdict
