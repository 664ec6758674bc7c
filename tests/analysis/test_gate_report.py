"""Exit codes, and the same report as JSON, Markdown and JUnit XML."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest
from runs import draw_runs, make_run

from tracekern.gate.budget import Budget
from tracekern.gate.check import check
from tracekern.gate.report import Outcome, junit, markdown, order

COPY = "dispatch.copy_token.p50"
BASE = draw_runs(8, 1)
SAME = draw_runs(8, 2)
SLOW = draw_runs(8, 2, factor={COPY: 1.2})
NOISY = draw_runs(8, 2, spread=0.2)
LOSSY = [*SAME[:7], dataclasses.replace(SAME[7], losses=("2 records | lost",))]
TIGHT, LOOSE = Budget("copy_token.p50", 3000.0), Budget("copy_token.p50", 9000.0)


@pytest.mark.parametrize(
    ("head", "base", "budgets", "undecided_fails", "outcome"),
    [
        (SAME, BASE, [], True, Outcome.GOOD),
        (SLOW, BASE, [], True, Outcome.REGRESSED),
        (NOISY, BASE, [], True, Outcome.CANNOT_SAY),
        (NOISY, BASE, [], False, Outcome.GOOD),
        (SAME, None, [LOOSE], True, Outcome.GOOD),
        (SAME, None, [TIGHT], True, Outcome.REGRESSED),
        (SAME[:1], None, [TIGHT], True, Outcome.REGRESSED),  # a budget needs no second run
        (SAME, BASE, [TIGHT], True, Outcome.REGRESSED),
        (LOSSY, BASE, [], True, Outcome.CANNOT_SAY),
        (LOSSY, None, [LOOSE], True, Outcome.CANNOT_SAY),
        (LOSSY, None, [TIGHT], False, Outcome.CANNOT_SAY),
        (SAME[:3], BASE, [], False, Outcome.CANNOT_SAY),
        ([dataclasses.replace(SAME[0], spans={})], None, [LOOSE], False, Outcome.CANNOT_SAY),
    ],
)
def test_the_exit_code(head, base, budgets, undecided_fails, outcome):
    report = check(head, base, budgets, undecided_fails=undecided_fails)
    assert report.outcome is outcome
    document = json.loads(json.dumps(report.as_dict()))
    assert document["exit_code"] == int(outcome)
    assert document["headline"]


def test_markdown_shows_what_a_reviewer_needs():
    text = markdown(check(SLOW, BASE, [TIGHT], head_name="new|code", base_name="0001"))
    assert text.startswith("### ❌ tracekern: dispatch.copy_token.p50 is over its budget")
    assert "| `dispatch.copy_token.p50` | 3.00 us | 4.8" in text
    assert "**regressed**" in text
    assert "new\\|code" in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")
    odd = {"gemm<a||b>.copy_token.p50": 1000.0}
    sides = [draw_runs(5, seed, metrics=odd, factor=dict.fromkeys(odd, grown)) for seed, grown in ((1, 1.0), (2, 1.5))]
    row = next(line for line in markdown(check(sides[1], sides[0])).splitlines() if line.startswith("| `"))
    assert row.startswith("| `gemm<a\\|\\|b>.copy_token.p50` | 1.0")
    assert "\n| budget | limit | value | |\n| --- | ---: | ---: | --- |\n" in text
    assert text.endswith("\n\nbase: 0001 · head: new\\|code\n")
    few = [dataclasses.replace(run, spans={**run.spans, "dispatch.wait_token": 99}) for run in BASE]
    assert "\n\n- not gated, fewer than 100 spans in a run: dispatch.wait_token.p99\n" in markdown(check(SAME, few))
    lossy = markdown(check(LOSSY, BASE))
    assert lossy.startswith("### ❔")
    assert "2 records \\| lost" in lossy


def test_what_grew_most_stands_first():
    wait = "dispatch.wait_token.p50"
    report = check(draw_runs(8, 2, factor={COPY: 1.2, wait: 1.5, "combine.reduce_token.p50": 0.5}), BASE)
    ordered = [(change.metric, change.verdict.value) for change in order(report.comparison.changes)]
    assert ordered[:2] == [(wait, "regressed"), (COPY, "regressed")]
    assert ordered[2] == ("combine.reduce_token.p50", "better")


def test_json_has_all_that_is_known():
    document = check(LOSSY, BASE, [TIGHT], head_name="code", base_name="0001").as_dict()
    assert (document["outcome"], document["base"], document["head"]) == ("cannot_say", "0001", "code")
    assert document["problems"][0].endswith("proves nothing: 2 records | lost")
    assert document["budgets"] == []
    document = check(SLOW, BASE, [TIGHT]).as_dict()
    (budget,) = document["budgets"]
    assert budget == {"metric": COPY, "limit": 3000.0, "value": budget["value"], "ok": False}
    regressed = [change for change in document["comparison"]["changes"] if change["verdict"] == "regressed"]
    assert [change["metric"] for change in regressed] == [COPY]
    for side, runs in (("base", BASE), ("head", SLOW)):
        values = [run.metrics[COPY] for run in runs]
        assert regressed[0][side] == pytest.approx(statistics.median(values))
        assert regressed[0][f"{side}_spread"] == pytest.approx(statistics.stdev(map(math.log, values)))


def test_junit_is_read_back_by_its_package(tmp_path):
    from junitparser import Error, Failure, JUnitXml, Skipped

    def results(report) -> dict[str, list[type]]:
        junit(report, tmp_path / "out.xml")
        return {
            case.name: [type(result) for result in case.result]
            for suite in JUnitXml.fromfile(str(tmp_path / "out.xml"))
            for case in suite
        }

    found = results(check(SLOW, BASE))
    assert found.pop(COPY) == [Failure]
    assert set(map(tuple, found.values())) == {()}
    assert results(check(SAME, None, [TIGHT])) == {COPY: [Failure]}
    assert [Error] in results(check(NOISY, BASE)).values()
    assert [Skipped] in results(check(NOISY, BASE, undecided_fails=False)).values()
    assert results(check(LOSSY, BASE)) == {"check": [Error]}
    junit(check(SAME, BASE, [LOOSE]), tmp_path / "out.xml")
    classes = [case.classname for suite in JUnitXml.fromfile(str(tmp_path / "out.xml")) for case in suite]
    assert classes == ["tracekern.budget"] + ["tracekern.compare"] * 7
    assert results(check([make_run(metrics={"a\x01b.w.p50": 2.0})], None, [Budget("w.p50", 1)])) == {
        r"a\x01b.w.p50": [Failure]
    }
