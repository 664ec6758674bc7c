"""`tracekern check` and `tracekern ab` as CI runs them: real captures, exit codes, files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from captures import CaptureSpec, write_capture
from launched import record
from runs import draw_runs
from simulator import Case, Shape, SlowWork, simulate

from tests.paths import ROOT
from tracekern.analysis.findings import analyze
from tracekern.gate import baseline
from tracekern.gate.cause import grown_cause
from tracekern.timeline.load import load

PROGRAM = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'tests' / 'launched.py'))}"
RUNS = 8
WAIT = "dispatch.wait_token.p50"
WITH_PYTHON = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    return ended.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def launches(tmp_path_factory) -> Path:
    """base/, head/ and slow/ of eight captures, lossy/ with one more that lost records, wide/ of another shape."""
    directory = tmp_path_factory.mktemp("launches")
    for side, settings in {
        "base": {},
        "head": {},
        "slow": {"slow_wait": 1.3},
        "lossy": {},
        "wide": {"tokens": 128},
    }.items():
        for number in range(RUNS):
            record(directory / side / f"{side}_{number:02}", **settings)
    record(directory / "lossy" / "lossy_99", room=50)
    return directory


@pytest.fixture
def check(command_line, tmp_path):
    """Runs `tracekern check` with its storage and no configuration but the test's own."""

    (tmp_path / "pyproject.toml").touch()

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        place = ["--storage", tmp_path / "kept", "--config", tmp_path / "pyproject.toml"]
        return command_line("check", *arguments, *place)

    return run


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "kept").rglob("*.json"))


def test_save_then_hold_against_the_latest(check, launches, tmp_path):
    saved = check(launches / "base", "--save")
    assert saved.returncode == 0, saved.stderr
    assert "saved 8 runs as" in saved.stderr
    told = re.search(rf"\+\d+\.\d % +(\d+) of 100 +{re.escape(WAIT)}", saved.stderr)
    assert int(told[1]) >= 95, "the minimal detectable change is told, and the power"
    same = check(launches / "head", "--against", "latest")
    assert same.returncode == 0, same.stdout + same.stderr
    assert "nothing regressed" in same.stdout
    assert "95 of 100 such checks find +15.0 % in " in same.stderr
    slow = check(launches / "slow", "--against", "1", "--save")
    assert slow.returncode == 1
    assert f"{WAIT} regressed by +" in slow.stdout
    shown = re.fullmatch(r"next: \S*tracekern open (.*/slow/slow_\d\d)", last_line(slow))
    assert shown, "a baseline that was saved has no captures"
    assert "combine.wait_token.p50 regressed" not in slow.stdout
    assert len(kept(tmp_path)) == 1, "what regressed does not become the next baseline"


def test_captures_against_captures(check, launches):
    result = check(launches / "slow", "--against", launches / "base", "--json")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert (report["outcome"], report["exit_code"]) == ("regressed", 1)
    (change,) = [change for change in report["comparison"]["changes"] if change["metric"] == WAIT]
    assert change["verdict"] == "regressed"
    assert change["low"] < 0.3 < change["high"] + 0.02
    assert [Path(place).parent.name for place in report["look_at"]] == ["base", "slow"]
    told = last_line(check(launches / "slow", "--against", launches / "base"))
    step = re.fullmatch(r"next: (\S*tracekern diff \S+/base/\S+ \S+/slow/\S+)", told)
    assert step, "of one rank no report names a cause"
    shown = subprocess.run(step[1], shell=True, executable="/bin/bash", env=WITH_PYTHON, capture_output=True)
    assert shown.returncode == 0, shown.stderr
    single = check(*sorted((launches / "head").iterdir()), "--against", launches / "base")
    assert single.returncode == 0, single.stdout + single.stderr


def test_the_cause_in_head_of_what_grew_is_named(check, tmp_path):
    """Rank 3 is slower on both sides, and costs less than rank 1, which is slow in head alone."""
    both, new = SlowWork(1_000, rank=3), SlowWork(6_000, rank=1)
    for side, injections in (("base", (both,)), ("head", (both, new))):
        for number in range(5):
            case = Case(Shape.EXCHANGE, 4, 10, injections, 0.01)
            simulate(case, number + 5 * (side == "head"), tmp_path / side / f"{side}_{number}")
    ended = check(tmp_path / "head", "--against", tmp_path / "base", "--markdown", tmp_path / "told.md")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    *_, cause, step = ended.stdout.splitlines()
    assert re.fullmatch(r"cause in head: Rank 1 is slow: each \w+\.\w+ takes .* The run would be .* shorter.*", cause)
    why = re.fullmatch(r"next: .*tracekern diff .*   and why: (.*tracekern report .*)", step)
    shown = subprocess.run(why[1], shell=True, executable="/bin/bash", env=WITH_PYTHON, capture_output=True, text=True)
    assert shown.stdout.startswith("verdict  Rank 1 is slow")
    answer = analyze(load(tmp_path / "head" / "head_0")).answer
    assert grown_cause(answer, None) is not None
    assert grown_cause(answer, answer) is None, "what costs as much in base has not grown"
    assert f"**Cause in head:** {cause.partition(': ')[2]}" in (tmp_path / "told.md").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--against", "{base}"],
        ["--against", "{base}", "--on-undecided", "pass"],
        ["--max", "wait_token.p50=1s"],
        ["--max", "wait_token.p50=1ns", "--on-undecided", "pass"],
        ["--save"],
        ["--append", "{history}"],
    ],
)
def test_a_lossy_capture_ends_in_2_whatever_is_asked(check, launches, tmp_path, arguments):
    places = {"base": launches / "base", "history": tmp_path / "history.jsonl"}
    result = check(launches / "lossy", *(argument.format(**places) for argument in arguments))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "lossy_99 proves nothing" in result.stdout
    assert kept(tmp_path) == []
    assert not places["history"].exists()


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (["head/head_00"], "1 run, wanted at least 5"),
        (["wide"], "{launches}/wide/wide_00, 64 in {launches}/base/base_00; compare runs of one shape, or save a new"),
    ],
)
def test_what_cannot_be_compared_ends_in_2(check, launches, runs, said):
    result = check(*(launches / run for run in runs), "--against", launches / "base", "--on-undecided", "pass")
    assert result.returncode == 2
    assert said.format(launches=launches) in result.stdout


def test_budgets_need_no_baseline_and_one_run(check, launches, tmp_path):
    run = launches / "head" / "head_00"
    assert check(run, "--max", "dispatch.wait_token.p50=1ms").returncode == 0
    over = check(run, "--max", "wait_token.p50=1us")
    assert over.returncode == 1
    assert over.stdout.count("over its budget") == 2, "both stages have that event"
    assert re.fullmatch(rf"next: \S*tracekern open {run}", last_line(over))
    (tmp_path / "pyproject.toml").write_text('[tool.tracekern.budgets]\n"wait_token.p50" = "1us"\n')
    assert check(run).returncode == 1
    assert check(run, "--max", "wait_token.p50=1ms").returncode == 0, "the command line comes last"
    unknown = check(run, "--max", "wait_tokens.p50=1ms")
    assert unknown.returncode == 2
    assert unknown.stdout == ""
    assert unknown.stderr.count("\n") == 1
    assert "similar are" in unknown.stderr


@pytest.mark.parametrize("asked", [["--max", "wait_token.p50=1ms"], ["--append", "history.jsonl"], ["--save"]])
def test_launches_of_different_work_are_held_and_kept_by_nothing(check, launches, tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    wide = next((launches / "wide").iterdir())
    first = launches / "head" / "head_00"
    result = check(first, wide, *asked)
    assert result.returncode == 2
    assert f"other shape: settings.tokens is 128 in {wide}, 64 in {first}" in result.stdout + result.stderr
    assert not kept(tmp_path)
    assert not Path("history.jsonl").exists()


def test_names_are_shown_as_they_are(check, tmp_path):
    """No markup, and no picture in place of a namespace."""
    named = {"gemm[fp8].copy_token.p50": 1000.0, "moe::fire::send.copy_token.p50": 1000.0}
    for side, seed, grown in (("base", 1, 1.0), ("head", 2, 1.5)):
        sides = draw_runs(5, seed, metrics=named, factor=dict.fromkeys(named, grown))
        baseline.write(tmp_path / f"{side}.json", sides, {})
    result = check(tmp_path / "head.json", "--against", tmp_path / "base.json", "--max", "copy_token.p50=1ns")
    assert result.returncode == 1, result.stderr
    for name in named:
        assert sum(line.endswith(name) for line in map(str.rstrip, result.stdout.splitlines())) == 2


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_leaves_early_changes_no_verdict(launches, more):
    reader, writer = os.pipe()
    os.close(reader)
    for limit, code in (("1s", 0), ("1us", 1)):
        words = ["check", str(launches / "head" / "head_00"), "--max", f"wait_token.p50={limit}", *more]
        command = [sys.executable, "-m", "tracekern", *words]
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
        assert (result.returncode, result.stderr) == (code, "")
    os.close(writer)


def test_files_for_a_pull_request(check, launches, tmp_path):
    arguments = ["--junit", tmp_path / "out.xml", "--markdown", tmp_path / "out.md", "--json"]
    result = check(launches / "slow", "--against", launches / "base", *arguments)
    assert result.returncode == 1
    suite = ET.parse(tmp_path / "out.xml").getroot().find("testsuite")
    failed = [case.get("name") for case in suite.findall("testcase") if case.find("failure") is not None]
    assert WAIT in failed
    undecided = [case for case in suite.findall("testcase") if case.find("error") is not None]
    assert (suite.get("failures"), suite.get("errors")) == (str(len(failed)), str(len(undecided)))
    assert "❌" in (tmp_path / "out.md").read_text()
    assert json.loads(result.stdout)["exit_code"] == 1
    bad = check(launches / "slow", "--against", launches / "base", "--markdown", tmp_path / "no" / "folder.md")
    assert bad.returncode == 2
    assert "its folder does not exist" in bad.stderr


@pytest.mark.parametrize("option", ["--append", "--trend", "--junit", "--markdown"])
def test_a_directory_in_place_of_an_output_is_refused_before_anything_is_kept(check, launches, tmp_path, option):
    history, taken = tmp_path / "history.jsonl", tmp_path / "taken"
    taken.mkdir()
    places = {"--append": history, option: taken}
    words = [word for name, place in places.items() for word in (name, place)]
    result = check(launches / "base", "--save", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert "taken: it exists and is not a regular file" in result.stderr
    assert kept(tmp_path) == []
    assert not history.exists()


def test_the_first_night_and_the_trend(check, launches, tmp_path):
    history, page = tmp_path / "history.jsonl", tmp_path / "trend.html"
    nightly = ["--against", "latest", "--save", "--append", history, "--trend", page]
    first = check(launches / "base", *nightly)
    assert first.returncode == 0, first.stderr
    assert "these runs become the first" in first.stderr
    second = check(launches / "head", *nightly)
    assert second.returncode == 0, second.stdout + second.stderr
    assert len(kept(tmp_path)) == 2
    third = check(launches / "slow", *nightly)
    assert third.returncode == 1
    assert f"drift: {WAIT} +" in third.stderr
    assert len(history.read_text().splitlines()) == 3
    other = check(launches / "wide", *nightly)
    assert other.returncode == 2, "another shape is no first night"
    assert "no baseline of this shape" in other.stderr
    text = page.read_text()
    assert "crept since the first check" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=(?!\"data:)", text), "the page loads nothing"


def test_an_interrupted_history_is_not_lost(check, launches, tmp_path):
    history = tmp_path / "history.jsonl"
    history.write_text("half a li")
    result = check(launches / "base", "--append", history)
    assert result.returncode == 2
    assert "history.jsonl:1: is not JSON" in result.stderr
    assert history.read_text() == "half a li"


def test_nothing_is_saved_of_too_few_runs(check, launches, tmp_path):
    result = check(launches / "head" / "head_00", "--save")
    assert result.returncode == 2
    assert result.stderr.startswith("tracekern: not saved: these runs: 1 run, wanted at least 5")
    assert result.stderr.count("\n") == 1
    assert kept(tmp_path) == []


def test_unaligned_captures_are_refused_and_have_no_end_to_end(check, tmp_path):
    for number in range(10):
        spec = CaptureSpec(clock_samples=False, run_id=f"unaligned{number}", launches=2)
        write_capture(tmp_path / ("runs" if number < 5 else "head") / str(number), spec)
    refused = check(tmp_path / "runs", "--save")
    assert refused.returncode == 2
    assert "--unaligned" in refused.stderr
    assert check(tmp_path / "runs", "--save", "--unaligned").returncode == 0
    assert check(tmp_path / "head", "--against", "latest", "--unaligned").returncode == 0
    itself = check(tmp_path / "runs", "--against", "latest", "--unaligned")
    assert itself.returncode == 2
    assert "5 launches of the program on both sides" in itself.stdout
    missing = check(tmp_path / "runs", "--unaligned", "--max", "end_to_end.p50=1s")
    assert missing.returncode == 2
    assert "no such metric" in missing.stderr


def test_a_fault_of_ours_is_never_a_pass(launches, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import tracekern.gate.check as module\n"
        "def broken(*arguments, **named):\n"
        "    raise RuntimeError('planted')\n"
        "module.check = broken\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "tracekern", "check", str(launches / "base"), "--max", "wait_token.p50=1s"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 2
    assert "fault of tracekern" in result.stderr


def test_a_gpu_node_needs_none_of_the_readers_packages(launches, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('polars', 'pyarrow', 'plotly', 'perfetto', 'junitparser'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "tracekern", "check", str(launches / "head"), "--against", str(launches / "base")]
    for more, code in (([], 0), (["--junit", "out.xml"], 2)):
        result = subprocess.run([*command, *more], capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert result.returncode == code, result.stderr
    assert "install tracekern[read], or `python -m pip install junitparser`" in result.stderr


def ab(command_line, *arguments: object) -> subprocess.CompletedProcess[str]:
    return command_line("ab", "--runs", 5, "--warm-ups", 0, *arguments, timeout=300)


def test_ab_launches_by_turns_and_names_what_is_slower(command_line, tmp_path):
    result = ab(
        command_line, "--base", f"{PROGRAM} {{out}}", "--head", f'{PROGRAM} "$TRACEKERN_OUT" --slow-wait 1.5',
        "-o", tmp_path / "ab", "--json",
    )  # fmt: skip
    assert result.returncode == 1, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert WAIT in report["headline"]
    created = sorted((tmp_path / "ab").iterdir(), key=lambda path: (path / "capture.json").stat().st_mtime_ns)
    turns = [path.name.partition("_")[0] for path in created]
    assert turns == ["base", "head", "head", "base", "base", "head", "head", "base", "base", "head"]
    assert [Path(place).name.partition("_")[0] for place in report["look_at"]] == ["base", "head"]


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("echo all went wrong; exit 3", "base ended with 3, saying 'all went wrong'"),
        ("true", "base left no capture"),
        ("sleep 100", "took longer than 1 s"),
    ],
)
def test_ab_with_a_command_that_fails(command_line, tmp_path, base, said):
    result = ab(command_line, "--base", base, "--head", "true", "--timeout", 1)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


@pytest.mark.parametrize("warm_ups", [0, 1])
def test_ab_stops_at_the_first_pair_that_cannot_be_compared(command_line, tmp_path, warm_ups):
    result = ab(
        command_line, "--base", f"{PROGRAM} {{out}}", "--head", f"{PROGRAM} {{out}} --tokens 9",
        "--warm-ups", warm_ups, "-o", tmp_path / "ab", "--junit", tmp_path / "junit.xml",
    )  # fmt: skip
    middle = "_warm_up" if warm_ups else ""
    assert result.returncode == 2
    shapes = f"settings.tokens is 9 in {tmp_path}/ab/head{middle}_00, 64 in {tmp_path}/ab/base{middle}_00"
    assert f"cannot say: other shape: {shapes}; compare runs of one shape\n" in result.stdout, result.stdout
    assert len(list((tmp_path / "ab").iterdir())) == 2
    assert "other shape" in (tmp_path / "junit.xml").read_text()


@pytest.mark.parametrize("option", ["--junit", "--markdown"])
def test_ab_launches_nothing_where_an_output_cannot_be_written(command_line, tmp_path, option):
    launched = tmp_path / "launched"
    result = ab(command_line, "--base", f"touch {launched}", "--head", "true", option, tmp_path)
    assert result.returncode == 2
    assert "it exists and is not a regular file" in result.stderr
    assert not launched.exists()
