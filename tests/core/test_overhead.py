"""What a span costs: measured here on the CPU backend, stored in the capture, and held against the spans of a GPU's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.captures import EVENT_TABLE, CaptureSpec, metadata, removed_after, reserve_launch
from tests.kernels import run_kernel
from tracekern.dump import format as fmt
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.record.overhead import measure_span
from tracekern.record.session import capture
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter
from tracekern.timeline.decode.decoder import decode

SPAN_COST_NS = 50


@pytest.mark.parametrize("record_format", ["span", "ring", "cycles"])
def test_the_cost_of_a_span_is_measured_on_the_cpu(record_format):
    cost = measure_span("cpu", record_format, 1, num_regions=500, num_rounds=11)
    assert cost.region_ns > 0  # no more: where others work too, the span may come out below zero
    assert (cost.record_format, cost.warps_per_sm) == (record_format, 1)


def test_the_command_measures_and_says_what(command_line):
    told = json.loads(command_line("overhead", "--backend", "cpu", "--json").stdout)
    assert told["backend"] == "cpu"
    assert {span["record_format"] for span in told["spans"]} == {"span", "cycles"}
    assert "says nothing about a GPU" in command_line("overhead", "--backend", "cpu").stdout


def test_a_capture_stores_it(tmp_path: Path):
    with capture(tmp_path) as session:
        run_kernel(session.launch("demo", grid=1, warps=1, events=EVENT_TABLE).descriptor, 1, 1, 1)
    stored = read_dump(tmp_path / "rank_00000.tkdump").metadata["overhead_ns"]
    assert list(stored) == ["1"]
    assert 0 <= stored["1"] < 1e6  # a difference of two times: 0 where a busy machine took longer for the untraced one


@pytest.mark.parametrize("stored", [[1], {"4": "fast"}, {"x": 1.0}, {"4": -1.0}, {"4": None}])
def test_nonsense_in_a_dump_is_refused(tmp_path: Path, stored: object):
    with pytest.raises(BadInput, match="overhead_ns"):
        problems_of(tmp_path, [100], 1000, overhead_ns=stored)


def problems_of(
    tmp_path: Path, lengths_ns: list[int], kernel_ns: int, event: str = "copy_token", **changes: object
) -> list[str]:
    """Texts of the dense_probes problems of one launch with 4 warps on one SM, each with these spans."""
    about = metadata(CaptureSpec(num_ranks=1), 0) | {"backend": "cuda", "overhead_ns": {"4": SPAN_COST_NS}} | changes
    with removed_after(SegmentWriter.create(f"overhead-{tmp_path.name}", 0, about, 1 << 22)) as segment:
        plan = LaunchPlan("demo", 1, 4, len(lengths_ns), blocks=range(1), events=json.dumps(EVENT_TABLE).encode())
        reserve_launch(segment, plan)
        entry = segment.launches()[0]
        headers, records = segment.track_headers(entry), segment.records(entry).view(fmt.SPAN_RECORD)
        headers["started"] = 1
        headers["start_ticks"], headers["end_ticks"] = 10**15, 10**15 + kernel_ns
        headers["written"] = headers["attempted"] = len(lengths_ns)
        ends = np.cumsum(lengths_ns)
        records["begin"], records["end"] = 10**15 + ends - lengths_ns & 0xFFFFFFFF, 10**15 + ends & 0xFFFFFFFF
        number = [entry["name"] for entry in EVENT_TABLE["events"]].index(event)
        records["word"] = fmt.RecordKind.SPAN | number << fmt.EVENT_SHIFT
        segment.header["state"] = fmt.SegmentState.CLOSED
        write_dump(tmp_path / "rank_00000.tkdump", segment)
    problems = decode(read_dump(tmp_path / "rank_00000.tkdump")).problems
    assert {(problem.kind, problem.severity) for problem in problems} <= {("dense_probes", "warning")}
    return [problem.text for problem in problems]


@pytest.mark.parametrize(
    ("lengths_ns", "kernel_ns"),
    [([2000] * 100, 220_000), ([100] * 100, 100_000), ([64] * 20, 10**6)],
    ids=["sparse", "5 % of the kernel, spans of twice what one costs", "few"],
)
def test_probes_may_take_as_much_as_is_said(tmp_path: Path, lengths_ns: list[int], kernel_ns: int):
    assert problems_of(tmp_path, lengths_ns, kernel_ns) == []


def test_probes_that_take_a_part_of_the_kernel_are_told(tmp_path: Path):
    (text,) = problems_of(tmp_path, [400] * 100, 50_000)  # 100 x 50 ns of 50 us
    assert "kernel demo: its probes take about 10% of its time (50 ns for each of 400 spans)" in text


def test_spans_as_short_as_their_recording_are_told(tmp_path: Path):
    (text,) = problems_of(tmp_path, [64] * 100, 10**6)
    assert "event copy_token: half of its 400 spans are shorter than 64 ns" in text


@pytest.mark.parametrize("event", ["signal_token", "wait_token"])
def test_only_work_can_be_too_short(tmp_path: Path, event: str):
    assert problems_of(tmp_path, [64] * 100, 10**6, event) == []


def test_the_cpu_backend_is_never_judged(tmp_path: Path):
    assert problems_of(tmp_path, [64] * 100, 10_000, backend="cpu") == []
    assert problems_of(tmp_path, [64] * 100, 10_000, overhead_ns={}) == []
