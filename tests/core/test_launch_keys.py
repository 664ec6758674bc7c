"""launch(..., key=): stored with the launch, on every span of a trace, and what `info` and `report` are asked by."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest
from trace_processor import TraceProcessor

import tracekern
from tests.kernels import run_kernel
from tests.sessions import TABLE
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.record.session import Capture, capture

LONG = "request " + "ä" * 60


def launch(session: Capture, key: str) -> None:
    launched = session.launch("demo", grid=1, warps=1, events=TABLE, key=key)
    run_kernel(launched.descriptor, 1, 1, 2)


def keys_of(directory: Path) -> list[str]:
    return [launch.key for launch in read_dump(directory / "rank_00000.tkdump").launches]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keyed") / "capture"
    with capture(directory) as session:
        for key in ("warm-up", "layer 1", "layer 2", "layer 1", "", LONG):
            launch(session, key)
    return directory


def test_a_key_is_stored_with_its_launch_and_a_long_one_is_cut_between_characters(keyed: Path):
    assert keys_of(keyed) == ["warm-up", "layer 1", "layer 2", "layer 1", "", "request " + "ä" * 43]


def test_a_region_that_is_used_again_has_the_key_of_its_last_launch(tmp_path: Path):
    with capture(tmp_path, keep="last", records_per_track=4, max_bytes=1 << 14) as session:
        for number in range(200):
            launch(session, f"request {number}" if number < 199 else "")
    kept = keys_of(tmp_path)
    assert 1 < len(kept) < 200
    assert sorted(kept) == sorted(["", *(f"request {number}" for number in range(200 - len(kept), 199))])


def test_a_key_that_is_no_text_is_refused(tmp_path: Path):
    with capture(tmp_path) as session:
        for wrong in (3, None, "\ud800"):
            with pytest.raises(BadInput, match="launch 'demo': key=.*; wanted text"):
                session.launch("demo", grid=1, warps=1, events=TABLE, key=wrong)


def test_every_span_of_a_trace_names_it(keyed: Path, tmp_path: Path):
    timeline = tracekern.load(keyed)
    for suffix in (".pftrace", ".json"):
        tracekern.save(timeline, tmp_path / f"trace{suffix}")
        rows = TraceProcessor(tmp_path / f"trace{suffix}").query(
            "select s.name, a.display_value from slice s join args a using (arg_set_id) "
            "where a.key glob '*launch_key' order by s.ts"
        )
        found = [key for name, key in rows if name == "copy_token"]
        assert found[:8] == ["warm-up"] * 2 + ["layer 1"] * 2 + ["layer 2"] * 2 + ["layer 1"] * 2, suffix
        assert len(found) == 10, "none where there is no key"
    tracekern.save(timeline, tmp_path / "spans.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "spans.parquet").to_pylist()
    assert [row["launch_key"] for row in table if row["event"] == "copy_token"][8:10] == [None, None]
    assert {row["launch_key"] for row in table} >= {"layer 1", "layer 2"}


def test_info_and_report_are_asked_by_it(keyed: Path, command_line):
    shown = command_line("info", keyed).stdout
    assert [line.split()[0] for line in shown.splitlines() if line.endswith(("layer 1", "layer 2"))] == ["2", "1"]
    told = {entry["key"]: entry for entry in json.loads(command_line("info", keyed, "--json").stdout)["keys"]}
    first, last = told["layer 2"]["window"]
    assert 0 <= told["layer 1"]["window"][0] < first < last < told["layer 1"]["window"][1]
    report = command_line("report", keyed, "--key", "layer 2")
    assert report.returncode == 0
    assert "--key 'layer 2'" in report.stderr, "the command for the page"
    by_window = command_line("report", keyed, "--window", f"{first}:{last}")
    assert report.stdout == by_window.stdout != command_line("report", keyed).stdout
    refused = command_line("report", keyed, "--key", "layer 3")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "tracekern: no launch has the key 'layer 3'; similar are layer 2, layer 1\n"
