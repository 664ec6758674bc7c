"""The commands as a user types them: exit codes, one line for what is wrong, stdout for programs, stderr for people."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tracekern
from tests.captures import CaptureSpec, write_capture
from tests.paths import ROOT
from tests.timelines import make_timeline
from tracekern.analysis.questions.summary import EventSummary, summarize
from tracekern.cli.commands.info import print_summary
from tracekern.cli.options import check_folders, parse_host, parse_ranks, parse_window
from tracekern.errors import BadInput
from tracekern.formatting import duration

SPEC = CaptureSpec(num_ranks=3, host_spans=4)


@pytest.fixture(scope="session")
def capture(tmp_path_factory) -> Path:
    return write_capture(tmp_path_factory.mktemp("capture"), SPEC)


@pytest.fixture(scope="session")
def lossy(tmp_path_factory) -> Path:
    """A capture whose tracks were too small."""
    spec = CaptureSpec(num_ranks=2, records_per_track=32, run_id="lossy")
    return write_capture(tmp_path_factory.mktemp("lossy"), spec)


@pytest.mark.parametrize(
    ("ns", "said"),
    [
        (0, "0 ns"),
        (950, "950 ns"),
        (999.7, "1.00 us"),
        (1250, "1.25 us"),
        (999_960, "1.00 ms"),
        (17.3e6, "17.3 ms"),
        (2.1e9, "2.10 s"),
    ],
)
def test_times_are_said_in_three_digits(ns, said):
    assert duration(ns) == said


def test_events_of_one_name_and_two_classes_are_two_rows(capsys):
    events = tuple(EventSummary("copy", kind, count, 10 * count, 10, -1) for kind, count in (("work", 3), ("wait", 5)))
    summary = summarize(make_timeline(1))
    print_summary(dataclasses.replace(summary, ranks=(dataclasses.replace(summary.ranks[0], events=events),)))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "copy" in line]
    assert [(row[0], row[-4]) for row in rows] == [("3", "work"), ("5", "wait")]


def refused(result: subprocess.CompletedProcess[str], *said: str) -> None:
    """Exit 2, nothing on stdout, one line on stderr that says all of `said`."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("tracekern: ")
    for text in said:
        assert text in result.stderr


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("0:10", (0, 10)),
        ("1.5ms:2ms", (1_500_000, 2_000_000)),
        ("3us:1s", (3_000, 1_000_000_000)),
        (None, None),
    ],
)
def test_windows(text, window):
    assert parse_window(text) == window


@pytest.mark.parametrize("text", ["", "5", "5:", ":5", "a:b", "-5:10", "1:2:3", "1min:2min"])
def test_bad_windows(text):
    with pytest.raises(BadInput, match=r"--window: .*wanted"):
        parse_window(text)


@pytest.mark.parametrize(("text", "ranks"), [("0", [0]), ("0,2-4", [0, 2, 3, 4]), ("3-3, 1", [1, 3]), (None, None)])
def test_ranks(text, ranks):
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "4-2", "1,,2", "-1", "0-99999999999", "1-2-3"])
def test_bad_ranks(text):
    with pytest.raises(BadInput, match=r"--ranks: .*wanted"):
        parse_ranks(text)


def test_host():
    assert parse_host("3=a=b.json") == (3, "a=b.json")
    for text in ("profile.json", "=profile.json", "x=profile.json", "3="):
        with pytest.raises(BadInput, match=r"--host: .*wanted"):
            parse_host(text)


def test_version(command_line):
    assert command_line("--version").stdout == f"tracekern {tracekern.__version__}\n"


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("typer", ("info", "CAPTURE")),
        ("rich", ("info", "CAPTURE")),
        ("torch", ("run", "moe", "-o", "out")),
        ("torch", ("overhead",)),
        ("pyarrow", ("export", "CAPTURE", "-o", "out.parquet")),
        ("plotly", ("report", "CAPTURE", "-o", "out.html")),
    ],
)
def test_where_a_package_is_missing_it_says_what_to_install(capture, tmp_path, missing, arguments):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = [str(capture) if word == "CAPTURE" else word for word in arguments]
    command = [sys.executable, "-m", "tracekern", *words]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    extra = "tracekern[run]" if missing == "torch" else "tracekern[read]"
    refused(result, f"needs {missing}", f"{extra}, or `python -m pip install {missing}`")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("sitecustomize.py", "__pycache__")] == []


def test_info_prints_what_is_there(command_line, capture):
    result = command_line("info", capture)
    assert result.returncode == 0, result.stderr
    num_spans = SPEC.num_ranks * (SPEC.spans_per_rank + SPEC.launches + SPEC.host_spans)
    assert f"3 ranks, {num_spans} spans" in result.stdout
    for word in ("reference", "ping-pong ±", "copy_token", "wait_token"):
        assert word in result.stdout


def test_info_json_is_one_object_and_nothing_else(command_line, capture):
    result = command_line("info", capture, "--json")
    assert result.stderr == ""
    summary = json.loads(result.stdout)
    assert summary["aligned"] is True
    assert summary["num_flows"] == SPEC.num_ranks * SPEC.flows_per_rank
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1, 2]
    assert [rank["records_lost"] for rank in summary["ranks"]] == [0, 0, 0]
    for rank in summary["ranks"]:
        assert sum(event["count"] for event in rank["events"]) == SPEC.spans_per_rank


def test_info_tells_losses_and_the_size_that_would_have_been_enough(command_line, lossy):
    """On one line for all ranks; each problem once."""
    told = command_line("info", lossy).stdout
    summary = json.loads(command_line("info", lossy, "--json").stdout)
    assert all(rank["records_lost"] > 0 for rank in summary["ranks"])
    assert all(rank["records_per_track"] == 32 for rank in summary["ranks"])
    needed = max(rank["records_needed"] for rank in summary["ranks"])
    lost = sum(rank["records_lost"] for rank in summary["ranks"])
    line = f"ranks 0 and 1 lost {lost} records: a track had room for 32; records_per_track={needed} would have been"
    assert told.count(line) == told.count(" would have been enough\n") - 1 == 1
    assert summary["problems"]["lost_records"] == lost
    assert re.search(rf"error lost_records: {lost:,}, the first: rank \d launch ", told)


def test_a_narrow_terminal_takes_nothing_out_of_a_table(capture):
    command = [sys.executable, "-m", "tracekern", "info", str(capture)]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    narrow = b""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS="40", TERM="dumb")
        os.execv(sys.executable, command)
    with contextlib.suppress(OSError):  # how Linux tells that the other end has closed
        while data := os.read(terminal, 1 << 16):
            narrow += data
    assert os.waitpid(pid, 0)[1] == 0
    assert (
        plain.splitlines()[1:]
        == re.sub(r"\x1b\[\d*m", "", narrow.decode()).splitlines()[-len(plain.splitlines()) + 1 :]
    )


def test_info_tells_what_is_known_where_clocks_cannot_be_related(command_line, tmp_path):
    """As of ranks that gave up on each other before they had sampled their clocks."""
    wild = write_capture(
        tmp_path / "wild", CaptureSpec(num_ranks=2, clock_samples=False, records_per_track=4, killed_rank=1)
    )
    whole = command_line("info", wild, "--unaligned")
    assert "error salvaged: rank 1 never closed" in whole.stdout
    for extra in ((), ("--json",)):
        result = command_line("info", wild, *extra)
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
        assert "no clock samples relate it" in result.stderr
        assert result.stdout == command_line("info", wild, "--unaligned", *extra).stdout


def perfetto_json(path: Path) -> list[dict]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_merge_says_what_it_wrote(command_line, capture, tmp_path):
    result = command_line("merge", capture, "-o", tmp_path / "all.pftrace.gz", "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert (said["format"], said["aligned"]) == ("perfetto", True)
    assert said["bytes"] == (tmp_path / "all.pftrace.gz").stat().st_size
    assert said["flows"] == SPEC.num_ranks * SPEC.flows_per_rank
    plain = command_line("merge", capture, "-o", tmp_path / "all.pftrace")
    assert f"{said['spans']:,} spans, {said['flows']:,} arrows" in plain.stdout


@pytest.mark.parametrize("command", ["merge", "export", "diff"])
@pytest.mark.parametrize(("suffix", "is_told"), [("pftrace", True), ("json", False)])
def test_who_wrote_a_perfetto_trace_is_told_how_to_see_it(command_line, capture, tmp_path, command, suffix, is_told):
    trace = tmp_path / f"my trace.{suffix}"
    captures = [capture] * (2 if command == "diff" else 1)
    result = command_line(command, *captures, "-o", trace)
    assert result.returncode == 0, result.stderr
    assert (f" open '{trace}'\n" in result.stdout + result.stderr) == is_told


def test_merge_takes_single_dumps(command_line, capture, tmp_path):
    dumps = sorted(capture.glob("*.tkdump"))
    results = [
        json.loads(command_line("merge", *captures, "-o", tmp_path / "x.pftrace", "--json").stdout)
        for captures in ([capture], dumps)
    ]
    assert results[0] == results[1]


def test_export_picks_format_ranks_and_window(command_line, capture, tmp_path):
    whole, part = tmp_path / "whole.json", tmp_path / "part.json.gz"
    assert command_line("export", capture, "-o", whole).returncode == 0
    assert command_line("export", capture, "-o", part, "--ranks", "0,2", "--window", "0:2us").returncode == 0
    spans = [event for event in perfetto_json(whole) if event["ph"] == "X"]
    some = [event for event in perfetto_json(part) if event["ph"] == "X"]
    assert 0 < len(some) < len(spans)
    assert len({event["pid"] for event in spans} - {event["pid"] for event in some}) == 1  # rank 1


def test_missing_ranks_are_left_out_where_one_asks_for_that(command_line, capture, tmp_path):
    two = sorted(capture.glob("*.tkdump"))[:2]
    assert command_line("merge", *two, "-o", tmp_path / "t.pftrace", "--partial").returncode == 0


def test_ranks_without_calibration_are_refused_unless_told(command_line, tmp_path):
    wild = write_capture(tmp_path / "wild", CaptureSpec(num_ranks=2, clock_samples=False, run_id="wild"))
    refused(command_line("merge", wild, "-o", tmp_path / "t.json"), "--unaligned")
    assert not (tmp_path / "t.json").exists()
    result = command_line("merge", wild, "-o", tmp_path / "t.json", "--unaligned", "--json")
    assert json.loads(result.stdout)["aligned"] is False
    assert "UNALIGNED" in (tmp_path / "t.json").read_text()


def test_a_folder_that_cannot_be_written_is_refused_at_the_door(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(BadInput, match="its folder cannot be written"):
        check_folders(None, tmp_path / "t.json")
