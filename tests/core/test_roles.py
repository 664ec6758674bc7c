"""Roles belong to a kernel: what a warp did in another kernel of the same stream does not show in this one."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels import TrackWriter

import tracekern
from tracekern.analysis.questions.balance import analyze_balance
from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.timeline.facts.roles import roles_of
from tracekern.timeline.model import Timeline, TrackKind

EVENT = {"ends_at": "completion", "channel": "", "begin_fields": "", "end_fields": ""}
TABLE = {
    "name": "T",
    "events": [EVENT | {"name": "copy_row", "class": "work"}, EVENT | {"name": "wait_row", "class": "wait"}],
}
KERNELS = (
    ("pipeline", ["load", "store"], [0, 1]),
    ("plain", [], [0, 0]),
    ("reverse", ["store", "load"], [0, 1]),
    ("back", ["load", "store"], [1, 0]),  # by the same table as in the first, the other way round
)
WANTED = {
    ("pipeline", 0): "load",
    ("pipeline", 1): "store",
    ("plain", 0): "",
    ("plain", 1): "",
    ("reverse", 0): "store",
    ("reverse", 1): "load",
    ("back", 0): "store",
    ("back", 1): "load",
}


@pytest.fixture(scope="module")
def timeline(tmp_path_factory) -> Timeline:
    directory: Path = tmp_path_factory.mktemp("roles") / "capture"
    with tracekern.capture(directory) as capture:
        for name, roles, own in KERNELS:
            launch = capture.launch(name, grid=1, warps=2, events=TABLE, roles=roles)
            for warp, role in enumerate(own):
                writer = TrackWriter(launch.descriptor, 0, warp, role)
                writer.span(0)
                writer.span(1)
                writer.finish()
    return tracekern.load(directory)


def test_a_span_has_the_role_of_its_kernel(timeline):
    number, names = roles_of(timeline, timeline.spans)
    found = {}
    for row, idx in enumerate(number.tolist()):
        track = timeline.tracks[timeline.spans.track[row]]
        if track.kind == TrackKind.DEVICE:
            found.setdefault((timeline.launches[timeline.spans.launch[row]].name, track.warp), set()).add(names[idx])
    assert found == {key: {role} for key, role in WANTED.items()}
    assert [track.role for track in timeline.tracks if track.kind == TrackKind.DEVICE] == ["load/store", "store/load"]


def test_balance_and_waits_are_summed_by_that_role(timeline):
    balance = analyze_balance(timeline)
    assert [(load.name, load.num_spans) for load in balance.roles] == [("", 2), ("load", 3), ("store", 3)]
    waits = analyze_waits(timeline)
    assert sorted(waits.roles[idx] for idx in waits.role) == ["", "", *["load"] * 3, *["store"] * 3]


def test_rows_of_parquet_have_it(timeline, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    tracekern.save(timeline, tmp_path / "trace.parquet")
    rows = parquet.read_table(tmp_path / "trace.parquet").to_pylist()
    found = {(row["launch"], row["warp"]): row["role"] or "" for row in rows if row["kind"] == "device"}
    assert found == WANTED
