"""Chrome JSON export against Perfetto's own trace processor."""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from pathlib import Path

import expected
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timelines import make_rank, make_timeline, timelines
from trace_processor import TraceProcessor, assert_no_loss, slices_of

from tracekern.export import labels
from tracekern.export.formats.chrome import _json, write_chrome
from tracekern.timeline.facts.counters import count_events
from tracekern.timeline.model import ClockFit, Timeline, TrackKind

FLOWS_SQL = """
select p.pid, t.name, source.ts, q.pid, u.name, target.ts
from flow
join slice source on source.id = flow.slice_out join thread_track k on k.id = source.track_id
join thread t on t.utid = k.utid join process p on p.upid = t.upid
join slice target on target.id = flow.slice_in join thread_track l on l.id = target.track_id
join thread u on u.utid = l.utid join process q on q.upid = u.upid
where source.name = 'sent' and target.name = 'released'
"""
OURS = "s.category not in ('flow', 'problem', 'about')"
loaded_slices = functools.partial(slices_of, arguments="args.", where=OURS)


def as_loaded(text: str) -> str:
    """Perfetto v52 decodes the escapes of a JSON string only when it holds a quote."""
    return text if '"' in text else _json(text)[1:-1]


@given(text=st.text())
def test_strings_stay_json(text: str):
    assert json.loads(_json(text)) == text


def thread_name(timeline: Timeline, track_idx: int) -> str:
    track = timeline.tracks[track_idx]
    if track.kind != TrackKind.DEVICE:
        return track.name
    return f"block {track.block:03} warp {track.warp:02} {track.role}".rstrip()


def expected_flow_ends(timeline: Timeline) -> Counter:
    """(rank, thread, time) of both ends of every arrow that does not point backwards."""
    spans = timeline.spans

    def place(span: int, time: int) -> tuple:
        track = int(spans.track[span])
        return timeline.tracks[track].rank, thread_name(timeline, track), time

    ends: Counter = Counter()
    for signal, wait in zip(timeline.flows.signal.tolist(), timeline.flows.wait.tolist(), strict=True):
        signal_end, wait_end = expected.draw_end(timeline, signal), expected.draw_end(timeline, wait)
        if wait_end > spans.start[signal]:
            sent = int(spans.start[signal]) if signal_end >= wait_end else signal_end
            ends[place(signal, sent), place(wait, wait_end)] += 1
    return ends


def check_picture(timeline: Timeline, path: Path) -> TraceProcessor:
    write_chrome(timeline, path)
    processor = TraceProcessor(path)
    assert_no_loss(processor)
    times = [*timeline.spans.start.tolist(), *timeline.marks.time.tolist(), 0]
    shift = max(0, -min(times))
    wanted: Counter = Counter()
    for (name, start, duration, arguments), count in sum(
        expected.slices_by_track(timeline).values(), Counter()
    ).items():
        texts = tuple((key, as_loaded(value) if isinstance(value, str) else value) for key, value in arguments)
        wanted[as_loaded(name), start, duration, texts] += count
    assert Counter(loaded_slices(processor, shift).values()) == wanted
    flows: Counter = Counter()
    for out_pid, out_thread, out_time, in_pid, in_thread, in_time in processor.query(FLOWS_SQL):
        source = (out_pid, out_thread.split(" (lane")[0], out_time - shift)
        flows[source, (in_pid, in_thread.split(" (lane")[0], in_time - shift)] += 1
    assert flows == expected_flow_ends(timeline)
    return processor


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_every_span_lies_on_its_thread(tmp_path: Path, name: str):
    timeline = make_timeline(num_ranks=3)
    processor = check_picture(timeline, tmp_path / name)
    with gzip.open(tmp_path / name) if name.endswith(".gz") else (tmp_path / name).open("rb") as file:
        phases = {event["ph"] for event in json.load(file)["traceEvents"]}
    assert phases == set("MXCisf"), "Perfetto reads the first letter alone"
    slices = loaded_slices(processor)
    by_thread: dict[tuple, list] = {}
    for slice_id, pid, process, thread in processor.query(
        "select s.id, p.pid, p.name, t.name from slice s join thread_track k on k.id = s.track_id "
        f"join thread t using (utid) join process p using (upid) where {OURS} order by s.ts, s.depth"
    ):
        by_thread.setdefault((pid, process, thread), []).append(slices[slice_id])
    wanted: dict[tuple, list] = {}
    for index, track_idx in enumerate(timeline.spans.track.tolist()):
        track = timeline.tracks[track_idx]
        thread = thread_name(timeline, track_idx)
        process = labels.rank_label(timeline.ranks[track.rank], 1)
        wanted.setdefault((track.rank, process, thread), []).append(expected.span_slice(timeline, index))
    assert by_thread == wanted


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_any_timeline_arrives_whole(tmp_path: Path, timeline: Timeline):
    check_picture(timeline, tmp_path / "trace.json")


def test_thread_numbers_mean_nothing_to_a_viewer(tmp_path: Path):
    path = tmp_path / "trace.json"
    write_chrome(make_timeline(num_ranks=3), path)
    events = json.loads(path.read_text())["traceEvents"]
    pids = {event["pid"] for event in events}
    owners = Counter(event["tid"] for event in events if event.get("name") == "thread_name")
    assert not pids & owners.keys()
    assert 0 not in owners
    assert set(owners.values()) == {1}


def test_a_script_finds_ranks_blocks_and_warps_by_number(tmp_path: Path):
    timeline = make_timeline(num_ranks=3)
    write_chrome(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {event["tid"]: event["args"] for event in events if event["name"] == "thread_name"}
    found = Counter(
        (event["pid"], threads[event["tid"]]["block"], threads[event["tid"]]["warp"], event["name"])
        for event in events
        if event["ph"] == "X" and event["cat"] in ("work", "wait", "signal", "sync")
    )
    tracks, spans = timeline.tracks, timeline.spans
    wanted = Counter(
        (tracks[track].rank, tracks[track].block, tracks[track].warp, timeline.events[event].name)
        for track, event in zip(spans.track.tolist(), spans.event.tolist(), strict=True)
        if tracks[track].kind is TrackKind.DEVICE
    )
    assert found == wanted


def test_the_file_tells_about_itself(tmp_path: Path):
    inf = float("inf")
    fits = (ClockFit("unaligned", inf, inf), ClockFit("ping-pong", 864.2, 90.0, host_hard_ns=1250.0))
    ranks = tuple(make_rank(rank, clock=fit) for rank, fit in enumerate((*fits, ClockFit("reference", 0.0, 0.0))))
    write_chrome(make_timeline(3, ranks=ranks, aligned=False), tmp_path / "trace.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert [trace["metadata"][f"rank_{rank}"].partition("backend cpu, closed, ")[2] for rank in range(3)] == [
        "UNALIGNED",
        "clock by ping-pong, ±864 ns proven, ±90 ns repeatable, host lanes ±1.25 us",
        "clock reference",
    ]
    assert trace["metadata"]["title"] == "tracekern: UNALIGNED moe dispatch"
    assert trace["metadata"]["run_id"] == "run-17"
    assert any("UNALIGNED" in event["name"] for event in trace["traceEvents"])


def test_counters_belong_to_their_rank(tmp_path: Path):
    timeline = make_timeline()
    write_chrome(timeline, tmp_path / "trace.json")
    processor = TraceProcessor(tmp_path / "trace.json")
    assert_no_loss(processor)
    drawn = processor.query(
        "select p.pid, t.name, c.ts, c.value from counter c join process_counter_track t on t.id = c.track_id "
        "join process p using (upid)"
    )
    wanted = [
        (counter.rank, f"{counter.name} {counter.unit}", time, value)
        for counter in count_events(timeline)
        for time, value in zip(counter.time.tolist(), counter.value.tolist(), strict=True)
    ]
    assert sorted(drawn) == sorted(wanted)
