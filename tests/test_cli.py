"""The commands as a user types them: exit codes, one line for what is wrong, stdout for programs, stderr for people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.captures import CaptureSpec, write_capture
from tracekern.cli.options import parse_host, parse_ranks, parse_window
from tracekern.errors import BadInput

SPEC = CaptureSpec(num_ranks=3, host_spans=4)


@pytest.fixture(scope="session")
def capture(tmp_path_factory) -> Path:
    return write_capture(tmp_path_factory.mktemp("capture"), SPEC)


@pytest.fixture(scope="session")
def lossy(tmp_path_factory) -> Path:
    """A capture whose tracks were too small."""
    spec = CaptureSpec(num_ranks=2, records_per_track=64, run_id="lossy")
    return write_capture(tmp_path_factory.mktemp("lossy"), spec)


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


def test_version_and_help(command_line):
    assert command_line("--version").stdout.startswith("tracekern ")
    commands = command_line("--help").stdout
    for name in ("info", "open"):
        assert name in commands
        assert command_line(name, "--help").returncode == 0
    assert command_line("no-such-command").returncode == 2
    assert command_line("info").returncode == 2


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_command_line_packages_it_says_what_to_install(tmp_path, missing):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {missing!r}:\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tracekern", "info", "x"]
    refused(
        subprocess.run(command, capture_output=True, text=True, env=environment),
        f"needs {missing}",
        "pip install 'tracekern[run]'",
    )


def test_info_prints_what_is_there(command_line, capture):
    result = command_line("info", capture)
    assert result.returncode == 0, result.stderr
    num_spans = SPEC.num_ranks * (SPEC.spans_per_rank + SPEC.launches + SPEC.host_spans)
    assert f"3 ranks, {num_spans} spans" in result.stdout
    for word in ("reference", "ping-pong", "proven", "copy_token", "wait_token"):
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
    result = command_line("info", lossy)
    summary = json.loads(command_line("info", lossy, "--json").stdout)
    for rank in summary["ranks"]:
        assert rank["records_lost"] > 0
        assert rank["records_per_track"] == 64
        line = f"rank {rank['rank']} lost {rank['records_lost']} records: a track had room for 64; --records-per-track"
        assert f"{line} {rank['records_needed']} would have been enough" in result.stdout


def test_info_on_something_else(command_line, tmp_path):
    refused(command_line("info", tmp_path), str(tmp_path), "not a capture directory")
    refused(command_line("info", tmp_path / "missing"), "missing")
