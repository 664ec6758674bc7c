"""`tracekern merge`, `export` and `check` of captures that do not fit into the memory that --memory allows."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from tests.paths import TRACES
from tracekern.timeline.load import load

LEAST = "254MB"
"""So much is enough for windows of some 13,000 spans."""
NO_BUDGETS = "[tool.tracekern.budgets]\n"


@pytest.mark.parametrize("command", ["merge", "export"])
def test_what_does_not_fit_is_written_in_windows(command_line, tmp_path: Path, command: str):
    capture, whole, parts = TRACES / "h200_resident", tmp_path / "whole.parquet", tmp_path / "parts.parquet"
    for output, memory, words in (
        (whole, "4GB", "in memory: 46,720 spans take about "),
        (parts, LEAST, " do not fit into "),
    ):
        ended = command_line(command, capture, "-o", output, "--memory", memory, "--json")
        assert ended.returncode == 0, ended.stderr
        assert words in ended.stderr
        told = json.loads(ended.stdout)
        assert (told["format"], told["bytes"]) == ("parquet", output.stat().st_size)
        assert told["spans"] == len(load(capture).spans)
    assert pl.read_parquet(whole).sort("span", "start_ns").equals(pl.read_parquet(parts).sort("span", "start_ns"))
    assert sorted(tmp_path.iterdir()) == [parts, whole]


def test_what_has_no_windows_says_so_before_it_starts(command_line, tmp_path: Path):
    trace = tmp_path / "trace.pftrace"
    for name, words in (
        ("h200_int4_ring", "all launches are one window: at no time between iterations have all launches ahead ended"),
        ("two_hosts", "all at once: arrows lead through proxies out of every window; "),
    ):
        ended = command_line("merge", TRACES / name, "-o", trace, "--memory", LEAST)
        assert ended.returncode == 0, ended.stderr
        assert words in ended.stderr
        assert " of CPU time" in ended.stderr
        assert trace.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory", "4 bytes"], "--memory: got '4 bytes', wanted a number and MB, GB or TB, as in 4GB"),
        (["--memory", "100MB"], "of memory are too little for any window"),
        (["--memory", LEAST, "--ranks", "0"], "windows are of all ranks; name their dumps with --partial"),
        (["--memory", LEAST, "--window", "900s:901s"], "--window: nothing was recorded from 900 s to 901 s"),
    ],
)
def test_bad_input_is_one_line(command_line, tmp_path: Path, options: list[str], words: str):
    trace = tmp_path / "trace.pftrace"
    ended = command_line("merge", TRACES / "h200_resident", "-o", trace, *options)
    assert ended.returncode == 2
    *notes, last = ended.stderr.splitlines()
    assert words in last
    assert all(line.startswith("in windows: ") for line in notes)
    assert not trace.exists()


def test_a_check_in_windows_has_the_same_figures(command_line, tmp_path: Path):
    (config := tmp_path / "pyproject.toml").write_text(NO_BUDGETS)
    told = []
    for memory in ("4GB", LEAST):
        history = tmp_path / f"{memory}.jsonl"
        ended = command_line(
            *("check", TRACES / "h200_resident", "--append", history, "--memory", memory, "--json"),
            *("--storage", tmp_path / "kept", "--config", config),
        )
        assert ended.returncode == 0, ended.stderr
        assert ("do not fit" in ended.stderr) == (memory == LEAST)
        told.append(json.loads(ended.stdout) | {"runs": [json.loads(line) for line in history.open()]})
    for entry in (entry for one in told for entry in one["runs"]):
        entry.pop("created")  # when it was added to the history
    assert told[0] == told[1]
