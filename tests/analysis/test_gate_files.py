"""What the gate keeps and reads: baselines, budgets, histories; whole, and damaged in every way."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest
from captures import CaptureSpec, write_capture
from damage import Parts, build
from hypothesis import given
from hypothesis import strategies as st
from runs import METRICS, draw_runs, make_run
from timelines import make_launch, make_timeline

from tests.paths import TRACES
from tracekern.analysis.statistics import phase_statistics
from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.formatting import without_nan
from tracekern.gate import baseline, history
from tracekern.gate.budget import Budget, check_budgets, parse_budget, read_budgets
from tracekern.gate.compare import Rules, compare
from tracekern.gate.run import Run, difference, read_run
from tracekern.gate.run import make_run as run_of
from tracekern.moe.workload.options import MoeRun


def rounded(runs: list[Run], source: Path) -> list[Run]:
    """As they come back from a file: six digits, another source."""
    return [Run.from_dict(str(source), run.as_dict()) for run in runs]


def test_a_baseline_comes_back(tmp_path):
    runs = draw_runs(5, 1)
    path = baseline.save(runs, tmp_path)
    assert path.parent == tmp_path / "nvidia-h200"
    assert path.name.startswith("0001_")
    assert baseline.read(path) == rounded(runs, path)
    for run, again in zip(runs, baseline.read(path), strict=True):
        assert again.metrics == pytest.approx(run.metrics, rel=1e-5)
        assert (again.shape, again.nodes, again.losses) == (run.shape, run.nodes, run.losses)
    document = json.loads(path.read_text())
    assert (document["format"], document["version"]) == ("tracekern-baseline", 1)
    assert document["machine"]["node"]


def test_baselines_are_numbered_and_named_after_the_commit(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    git("init", "-b", "trunk")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    first = baseline.save(draw_runs(5, 1))
    (tmp_path / "file").rename(tmp_path / os.fsdecode(b"\xfcbung"))
    git("config", "core.quotePath", "false")
    git("add", "--all", ".", ":!.tracekern")
    git("branch", "--move", "größe")
    second = baseline.save(draw_runs(5, 2))
    commit, changed = (json.loads(path.read_text())["commit"] for path in (first, second))
    assert (commit["branch"], commit["dirty"], len(commit["id"])) == ("trunk", False, 40)
    assert (changed["branch"], changed["dirty"], changed["id"]) == ("größe", True, commit["id"])
    assert first.name.startswith(f"0001_{commit['id'][:12]}_20")
    assert second.name.startswith("0002_")


def test_settings_of_a_program_of_ones_own_all_count(tmp_path):
    baseline.save([make_run(shape={"ranks": 4, "settings": {"tokens": 64, "keep": 1}})], tmp_path)
    with pytest.raises(BadInput, match=r"settings\.keep is 2 in .*, 1 in "):
        baseline.find("latest", make_run(shape={"ranks": 4, "settings": {"tokens": 64, "keep": 2}}), tmp_path)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_shape_names_all_grids_of_a_kernel_in_whatever_order_they_ran(order):
    launches = [dataclasses.replace(make_launch(0, sequence=i), num_blocks=2 + 6 * (i % 2)) for i in order]
    timeline = make_timeline(1, launches=tuple(launches))
    run = run_of("run", phase_statistics(timeline), timeline, {})
    assert run.shape["launches"] == {"dispatch": "2x2 8x2"}


@pytest.mark.parametrize("kept", ["launches/cpu.json", "launches/nvidia-h200.json", "cpu_8_ranks", "h200x4_late_host"])
def test_what_was_kept_has_the_shape_of_the_same_work_today(kept):
    """The capture's own command says what the work was; for launches its script's table does."""
    (run, *_) = baseline.read_any([TRACES / kept])
    works = {
        "launches/cpu.json": MoeRun(ranks=4, tokens=16, hidden=65536, experts=16, topk=4),
        "launches/nvidia-h200.json": MoeRun(ranks=4, tokens=64, hidden=7168, experts=64, topk=4),
        "cpu_8_ranks": MoeRun(),
        "h200x4_late_host": MoeRun(ranks=4, tokens=32, hidden=7168, experts=64, topk=4),
    }
    assert run.shape["settings"] == works[kept].workload


def test_a_baseline_is_found_by_number_path_and_shape(tmp_path):
    small, large = ({"ranks": 4, "settings": {"tokens": tokens}} for tokens in (64, 128))
    first, second, third = (baseline.save([make_run(0, shape=shape)], tmp_path) for shape in (small, small, large))
    like = make_run(1, shape=small)
    assert baseline.find("latest", like, tmp_path) == second
    assert baseline.find("latest", make_run(1, shape=large), tmp_path) == third
    assert baseline.find("1", like, tmp_path) == first
    assert baseline.find(str(third), like, tmp_path) == third
    with pytest.raises(BadInput, match="no baseline of this shape.*settings.tokens is 64 in .*, 128 in "):
        baseline.find("latest", make_run(1, shape={**small, "ranks": 2}), tmp_path)
    with pytest.raises(BadInput, match="no baseline 0009.*0001 to 0003"):
        baseline.find("9", like, tmp_path)
    with pytest.raises(BadInput, match="no baseline in .*--save"):
        baseline.find("latest", make_run(device="another"), tmp_path)


def test_hosts_that_share_a_folder_find_their_own_baselines(tmp_path):
    ours, theirs = (baseline.save([make_run(0, nodes=(node,))], tmp_path) for node in ("ours", "theirs"))
    found = {node: baseline.find("latest", make_run(1, nodes=(node,)), tmp_path) for node in ("ours", "theirs", "new")}
    assert found == {"ours": ours, "theirs": theirs, "new": theirs}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: text.replace('"tracekern-baseline"', '"other"'), "is not a baseline"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "baseline version 2, this tracekern knows 1"),
        (lambda text: json.dumps({**json.loads(text), "runs": []}), "holds no runs"),
        (lambda text: text.replace('"run_id"', '"name"'), "other fields"),
        (lambda text: text.replace('"metrics": {', '"metrics": {"a.b.p50": null, '), "field metrics of a run"),
        (lambda text: text.replace('"metrics": {', '"metrics": {"a.b.p50": -1, '), "field metrics of a run"),
    ],
)
def test_a_damaged_baseline_is_refused_in_a_line(tmp_path, damage, said):
    path = baseline.save([make_run()], tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(BadInput, match=said) as error:
        baseline.read(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(field=st.sampled_from(sorted(make_run().as_dict())), value=_JSON)
def test_any_value_in_a_run_is_taken_or_refused(field, value):
    values = {**make_run().as_dict(), field: value}
    with contextlib.suppress(BadInput):
        run = Run.from_dict("file", values)
        difference(run, make_run())
        baseline.slug(run.device)
        assert Run.from_dict("file", json.loads(json.dumps(run.as_dict()))).run_id == run.run_id
        compare([run] * 5, [make_run()] * 5, Rules())


@pytest.mark.parametrize("number", [1e308, 10**400, -1, float("nan")], ids=lambda number: f"{str(number)[:6]}")
def test_a_number_that_no_clock_gives_is_refused(number):
    for field, value in (("resolution_ns", number), ("metrics", {COPY: number})):
        with pytest.raises(BadInput, match="which cannot be"):
            Run.from_dict("file", {**make_run().as_dict(), field: value})


def test_checks_at_the_same_time_lose_nothing_of_each_other(tmp_path):
    """Each in a process of its own, as two jobs on one runner are."""
    count = 40
    sides = [draw_runs(5, number) for number in range(count)]
    with concurrent.futures.ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(history.append, tmp_path / "history.jsonl", runs, "good") for runs in sides]
        waiting += [pool.submit(baseline.save, runs, tmp_path) for runs in sides]
        results = [done.result(60) for done in waiting]
    assert len(history.read(tmp_path / "history.jsonl")) == count
    assert len(set(results[count:])) == count
    assert sorted(path.name[:4] for path in results[count:]) == [f"{number:04}" for number in range(1, count + 1)]
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".jsonl"}


def test_captures_are_found_one_level_below_and_counted_once(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        baseline.read_any([tmp_path / "nothing"])
    with pytest.raises(BadInput, match="no capture in it"):
        baseline.read_any([tmp_path])
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "capture.json").write_text("{}")
    with pytest.raises(BadInput, match=r"lost: no rank_\*.tkdump in it"):
        baseline.read_any([tmp_path])
    path = baseline.save(draw_runs(5, 1), tmp_path)
    assert len(baseline.read_any([path])) == 5
    with pytest.raises(BadInput, match="named twice"):
        baseline.read_any([path, path.parent / ".." / path.parent.name / path.name])


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("wait_token.p99=20us", Budget("wait_token.p99", 20_000)),
        ("dispatch.wait_token.p50 = 1.5 ms", Budget("dispatch.wait_token.p50", 1_500_000)),
        ("wait_token.wait_share=30%", Budget("wait_token.wait_share", 0.3)),
        ("wait_token.wait_share=100%", Budget("wait_token.wait_share", 1.0)),
        ("end_to_end.p50=1s", Budget("end_to_end.p50", 1e9)),
    ],
)
def test_budgets(text, budget):
    assert parse_budget(text).name == budget.name
    assert parse_budget(text).limit == pytest.approx(budget.limit)


@pytest.mark.parametrize(
    "text",
    ["", "wait_token.p99", "p99=1us", ".p99=1us", "wait_token.p98=1us", "wait_token.p99=20", "wait_token.p99=20%"]
    + ["wait_token.p99=-1us", "wait_token.wait_share=1us", "wait_token.p99=us", "wait_token.p99=1us2"]
    + ["wait_token.wait_share=100.5%"],
)
def test_bad_budgets(text):
    with pytest.raises(BadInput, match="budget .*wanted"):
        parse_budget(text)


def test_a_budget_holds_for_a_stage_with_a_dot_in_its_name():
    (result,) = check_budgets([Budget("wait_token.p50", 200)], [make_run(0, {"my.kernel.wait_token.p50": 100.0})])
    assert result.ok


def test_a_budget_holds_for_every_stage_that_has_the_event():
    metrics = {"dispatch.wait_token.p50": 100.0, "combine.wait_token.p50": 300.0, "combine.wait_token.p99": 900.0}
    runs = [make_run(i, {name: value + i for name, value in metrics.items()}) for i in range(3)]
    results = check_budgets([Budget("wait_token.p50", 200)], runs)
    assert [(result.metric, result.value, result.ok) for result in results] == [
        ("dispatch.wait_token.p50", 101, True),
        ("combine.wait_token.p50", 301, False),
    ]
    assert [result.metric for result in check_budgets([Budget("combine.wait_token.p99", 901)], runs)] == [
        "combine.wait_token.p99"
    ]


def test_a_budget_that_is_used_up_is_kept():
    (result,) = check_budgets([Budget("wait_token.p50", 100)], [make_run(0, {"dispatch.wait_token.p50": 100.0})])
    assert result.ok


def test_a_budget_is_for_the_runs_that_have_its_metric():
    runs = [make_run(0, {"dispatch.wait_token.p50": 100.0}), make_run(1, {"dispatch.copy_token.p50": 1.0})]
    (result,) = check_budgets([Budget("wait_token.p50", 99)], runs)
    assert (result.value, result.ok) == (100.0, False)


def test_a_budget_for_nothing_names_what_is_near():
    with pytest.raises(BadInput, match=r"wait_tokn.p50: no such metric; similar are .*wait_token\.p50"):
        check_budgets([Budget("wait_tokn.p50", 1)], [make_run()])
    with pytest.raises(BadInput, match="there are none"):
        check_budgets([Budget("zzz.p50", 1)], [make_run(metrics={})])


def test_budgets_of_pyproject(tmp_path):
    path = tmp_path / "pyproject.toml"
    assert read_budgets(path) == []
    path.write_text("[project]\nname = 'x'\n")
    assert read_budgets(path) == []
    path.write_text('[tool.tracekern.budgets]\n"wait_token.p99" = "20us"\n')
    assert read_budgets(path) == [Budget("wait_token.p99", 20_000)]
    unquoted = 'wait_token.p99 = "20us"\nwait_token.p50 = "2us"\nrecv.wait_token.wait_share = "30%"\n'
    path.write_text(f"[tool.tracekern.budgets]\n{unquoted}")
    expected = {"wait_token.p99": 20_000, "wait_token.p50": 2_000, "recv.wait_token.wait_share": 0.3}
    assert {budget.name: budget.limit for budget in read_budgets(path)} == expected
    for text, said in (
        ("[tool.tracekern.budgets\n", "cannot be read"),
        ("[tool.tracekern]\nbudgets = 3\n", "budgets is no table"),
        ('[tool.tracekern.budgets]\n"wait_token.p99" = 20\n', "wanted a time with its unit"),
        ("[tool.tracekern.budgets]\nwait_token.p99 = 20\n", "budget wait_token.p99: limit is 20, wanted a time"),
        (
            '[tool.tracekern.budgets]\nstep (wait).p99 = "20us"\n',
            'a budget is a line such as "wait_token.p99" = "20us"',
        ),
        ('[tool.tracekern.budgets]\na.p99 = "1us"\n"a.p99" = "2us"\n', "a.p99 is there twice, with quotes and"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=said) as error:
            read_budgets(path)
        assert str(path) in str(error.value)


COPY = "dispatch.copy_token.p50"


def test_slow_drift_that_no_single_check_sees(tmp_path):
    path = tmp_path / "history.jsonl"
    for step in range(8):
        entries = history.append(path, draw_runs(8, step, factor={COPY: 1.02**step}, first=8 * step), "good")
        if step < 2:
            assert history.drift(entries, Rules()) == ([] if step else None)
    assert len(entries) == len(history.read(path)) == 8
    (found,) = history.drift(entries, Rules())
    assert (found.since, found.change.metric) == (entries[0], COPY)
    assert found.change.estimate == pytest.approx(1.02**7 - 1, abs=0.03)
    points = history.series(entries)[COPY]
    assert len(points) == 8
    assert all(low <= middle <= high for _, low, middle, high in points)


RENAMED = "dispatch.renamed.p50"


@pytest.mark.parametrize(
    ("first", "since"),
    [
        (draw_runs(8, 50, metrics={**METRICS, "dispatch.gone.p50": 300.0}), {COPY: 0, RENAMED: 2}),
        (draw_runs(4, 50), {COPY: 1, RENAMED: 2}),
    ],
    ids=["a metric is gone since", "too few launches"],
)
def test_what_crept_is_told_whatever_the_first_check_was(tmp_path, first, since):
    """Each metric since the first check that can be compared with the newest and has it."""
    path = tmp_path / "history.jsonl"
    history.append(path, first, "good")
    for step in range(1, 8):
        metrics = {**METRICS, RENAMED: 700.0} if step > 1 else METRICS
        grown = dict.fromkeys((COPY, RENAMED), 1.04**step)
        entries = history.append(path, draw_runs(8, step, factor=grown, metrics=metrics), "good")
    found = history.drift(entries, Rules())
    assert {drift.change.metric: entries.index(drift.since) for drift in found} == since
    (only,) = history.drift(entries, Rules(metrics=("*copy*",)))
    assert only.change.metric == COPY
    assert history.drift([*entries, history.Entry("", "", "good", tuple(draw_runs(4, 99)))], Rules()) is None


def test_a_history_takes_a_launch_once(tmp_path):
    path = tmp_path / "history.jsonl"
    history.append(path, draw_runs(5, 1), "good")
    before = path.read_bytes()
    with pytest.raises(BadInput, match=r"history.jsonl: has .* since 20.*; append new launches"):
        history.append(path, [*draw_runs(4, 2, first=5), draw_runs(5, 1)[3]], "good")
    assert path.read_bytes() == before


def test_a_history_holds_other_shapes_and_places_apart(tmp_path):
    path = tmp_path / "history.jsonl"
    history.append(path, draw_runs(5, 1), "good")
    history.append(path, [make_run(9, nodes=("elsewhere",))], "good")
    entries = history.append(path, draw_runs(5, 2, first=5), "good")
    assert len(entries) == 3
    assert len(history.comparable(entries)) == 2


HISTORY = b'{"format": "tracekern-history", "version": %d, "runs": %b}'


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"a": 1}', b"\xff", HISTORY % (2, b"[{}]"), HISTORY % (1, b"[]")])
def test_a_file_that_is_no_history_is_left_as_it_is(tmp_path, line):
    path = tmp_path / "history.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(BadInput, match=r"history\.jsonl(:1: |: cannot be read)"):
        history.append(path, [make_run()], "good")
    assert path.read_bytes() == line + b"\n"


@pytest.mark.parametrize("one", [math.nan, [1, math.inf, {"deep": math.nan}]])
def test_settings_that_are_no_numbers_are_equal_to_themselves(tmp_path: Path, one: object):
    """Captures and baselines of before hold NaN; since then a capture keeps it as text."""
    for name in "ab":
        path = write_capture(tmp_path / name, CaptureSpec(num_ranks=1)) / fmt.dump_file_name(0)
        parts = Parts.of(path)
        parts.metadata["settings"] = {"x": one}
        metadata, payload = parts.layout()
        path.write_bytes(build(json.dumps(metadata).encode(), payload))
    old, again = (read_run(tmp_path / name) for name in "ab")
    assert difference(old, again) == ""
    assert difference(Run.from_dict("baseline", json.loads(json.dumps(old.as_dict()))), again) == ""
    other = dataclasses.replace(again, shape={**again.shape, "settings": {"x": 3.5}})
    assert difference(old, other).startswith("settings.x is 3.5 in ")
    since = dataclasses.replace(again, shape={**again.shape, "settings": {"x": without_nan(one)}})
    assert difference(old, since) == ""
