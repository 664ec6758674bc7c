"""Perfetto export against Perfetto's own trace processor: nothing lost, nothing invented, everything on its row."""

from __future__ import annotations

import functools
import gzip
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import expected
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from opening import longest_waits
from timelines import COPY, HOST, WAIT, make_launch, make_rank, make_spans, make_timeline, timelines
from trace_processor import TraceProcessor, assert_no_loss, slices_of

from tests.paths import TESTS, TRACES
from tracekern.errors import BadInput
from tracekern.export import labels
from tracekern.export.formats.perfetto import FLOWS_SQL, write_perfetto
from tracekern.export.rows import lay_out
from tracekern.timeline.facts.counters import count_events
from tracekern.timeline.load import load as load_capture
from tracekern.timeline.model import Flows, Marks, Spans, Timeline, Track, TrackKind

MARK = re.compile("^(longest wait|released it): .* · ")
OURS = "s.category not in ('flow', 'problem') and s.category is not null"
loaded_slices = functools.partial(slices_of, arguments="debug.", where=OURS)


def load(timeline: Timeline, path: Path, **options: object) -> TraceProcessor:
    write_perfetto(timeline, path, **options)
    processor = TraceProcessor(path)
    assert_no_loss(processor)
    return processor


def row_names(processor: TraceProcessor) -> dict[int, tuple[str, ...]]:
    """Track id -> names from the root down, without the marks of the longest wait."""
    tracks = {row[0]: row[1:] for row in processor.query("select id, parent_id, name from track")}
    tracks = {key: (parent, MARK.sub("", name)) for key, (parent, name) in tracks.items()}

    def path(track_id: int | None) -> tuple[str, ...]:
        return () if track_id is None else (*path(tracks[track_id][0]), tracks[track_id][1])

    return {track_id: path(track_id) for track_id in tracks}


def row_of_track(timeline: Timeline, track_idx: int) -> tuple[str, ...]:
    """The names of a track's row, from the rank down, as a reader would look for it."""
    track = timeline.tracks[track_idx]
    rank_row = labels.rank_label(timeline.ranks[track.rank], 1)
    if track.kind == TrackKind.LAUNCH:
        return (rank_row,)
    if track.kind == TrackKind.HOST:
        return rank_row, track.name
    return rank_row, "blocks", f"block {track.block:03}", f"warp {track.warp:02} {track.role}".rstrip()


def check_picture(timeline: Timeline, path: Path) -> TraceProcessor:
    processor = load(timeline, path)
    times = [*timeline.spans.start.tolist(), *timeline.marks.time.tolist(), 0]
    slices = loaded_slices(processor, max(0, -min(times)))
    assert Counter(slices.values()) == sum(expected.slices_by_track(timeline).values(), Counter())
    flows = Counter((slices[signal], slices[wait]) for signal, wait in processor.query(FLOWS_SQL))
    assert flows == expected.drawn_flows(timeline)
    assert sum(flows.values()) == processor.scalar("select count(*) from flow")
    return processor


@pytest.mark.parametrize("name", ["trace.pftrace", "trace.pftrace.gz"])
def test_every_span_lies_on_its_row(tmp_path: Path, name: str):
    timeline = make_timeline(num_ranks=3)
    processor = check_picture(timeline, tmp_path / name)
    rows, slices = row_names(processor), loaded_slices(processor)
    by_row: dict[tuple[str, ...], list] = {}
    for slice_id, track_id in processor.query(f"select id, track_id from slice s where {OURS} order by ts, depth"):
        by_row.setdefault(rows[track_id][1:], []).append(slices[slice_id])
    wanted: dict[tuple[str, ...], list] = {}
    for index, track in enumerate(timeline.spans.track.tolist()):
        wanted.setdefault(row_of_track(timeline, track), []).append(expected.span_slice(timeline, index))
    assert by_row == wanted


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_any_timeline_arrives_whole(tmp_path: Path, timeline: Timeline):
    check_picture(timeline, tmp_path / "trace.pftrace.gz")


def test_metadata_and_missing_alignment_are_visible(tmp_path: Path):
    ranks = (make_rank(0), make_rank(1, state="salvaged"))
    processor = load(make_timeline(aligned=False, ranks=ranks), tmp_path / "trace.pftrace")
    names = [row[0] for row in processor.query("select name from track where parent_id is null or name like 'rank %'")]
    assert names[0] == "tracekern: UNALIGNED moe dispatch"
    assert "rank 1 SALVAGED ±800 ns" in names
    banner = processor.scalar("select name from slice where category is null")
    assert "UNALIGNED" in banner
    assert "CPU backend: never durations" in banner
    facts = dict(
        processor.query("select key, display_value from args join slice using (arg_set_id) where category is null")
    )
    assert facts["debug.run_id"] == "run-17"
    assert facts["debug.command"] == "tracekern run moe"
    assert "±800 ns proven" in facts["debug.rank_1"]


def test_counters_stand_below_their_rank(tmp_path: Path):
    timeline = make_timeline()
    processor = load(timeline, tmp_path / "trace.pftrace")
    drawn = processor.query(
        "select p.name, t.name, c.ts, c.value from counter c join track t on t.id = c.track_id "
        "join track p on p.id = t.parent_id order by p.name, t.name, c.ts"
    )
    wanted = [
        (labels.rank_label(timeline.ranks[counter.rank], 1), counter.name, time, value)
        for counter in count_events(timeline)
        for time, value in zip(counter.time.tolist(), counter.value.tolist(), strict=True)
    ]
    assert drawn == sorted(wanted)
    ordered = processor.query(
        "select p.name, t.name from track t join track p on p.id = t.parent_id "
        "join track root on root.id = p.parent_id "
        "join args a on a.arg_set_id = t.source_arg_set_id "
        "where a.key = 'sibling_order_rank' and root.parent_id is null "
        "order by p.name, a.int_value, t.name desc"  # rows of one order stand in any
    )
    rows_of = {rank: [name for of_rank, name in ordered if of_rank == rank] for rank, _ in ordered}
    assert len(rows_of) == 2
    for names in rows_of.values():
        assert names == ["thread main", "blocks", "stalled warps", "token in flight"]


def test_the_rows_of_the_longest_wait_and_of_its_signal_are_marked(tmp_path: Path):
    timeline = load_capture(TRACES / "h200x4")
    typical, longest = longest_waits(timeline)
    assert typical != longest
    wanted = []
    for words, span in zip(("longest wait", "released it"), typical, strict=True):
        track = timeline.tracks[timeline.spans.track[span]]
        wanted.append(f"{words}: rank {track.rank} · {labels.warp_label(track)}")
    processor = load(timeline, tmp_path / "trace.pftrace")
    assert [
        name for (name,) in processor.query("select name from track where name glob '*: rank *' order by 1")
    ] == wanted


def test_lanes_of_torch_are_a_group_at_the_end(tmp_path: Path):
    processor = load(load_capture(TRACES / "h200x4_late_host"), tmp_path / "trace.pftrace")
    below = [names[2:] for names in row_names(processor).values() if len(names) > 2]
    assert {names[0] for names in below if names[-1].startswith("torch ")} == {"torch profiler"}
    assert {len(names) for names in below if names[0] == "torch profiler"} == {1, 2}


def test_of_too_many_arrows_those_of_the_longest_waits_are_drawn(tmp_path: Path):
    timeline = load_capture(TRACES / "h200x4")
    path = tmp_path / "trace.pftrace"
    stats = write_perfetto(timeline, path, max_flows=100)
    processor = TraceProcessor(path)
    assert (stats.flows, stats.flows_left_out) == (100, len(timeline.flows) - 100)
    assert processor.scalar("select count(*) from flow") == 100
    spans, wait = timeline.spans, timeline.flows.wait
    wait_ns = np.sort((spans.end - spans.start)[wait])
    drawn = [dur for (dur,) in processor.query(f"select s.dur from ({FLOWS_SQL}) f join slice s on s.id = f.wait_id")]
    assert sorted(drawn) == wait_ns[-100:].tolist()
    said = processor.scalar("select count(extract_arg(arg_set_id, 'debug.released_by')) from slice")
    assert said == len(np.unique(wait)), "what released a wait is said without an arrow, too"
    assert "1,828 arrows of shorter waits left out" in processor.scalar("select name from slice where category is null")


def test_ranks_stand_in_order(tmp_path: Path):
    timeline = make_timeline(num_ranks=12)
    shuffled = timeline.replace(ranks=tuple(reversed(timeline.ranks)))
    processor = load(shuffled, tmp_path / "trace.pftrace")
    ranked = processor.query(
        "select t.name, a.int_value from track t join args a on a.arg_set_id = t.source_arg_set_id "
        "where a.key = 'sibling_order_rank' and t.name like 'rank %' order by a.int_value"
    )
    assert [name.split()[1] for name, _ in ranked] == [str(rank) for rank in range(12)]


@pytest.mark.soak
def test_the_order_of_a_rank_of_very_many_warps_is_an_int32():
    blocks, warps = 65_536, 8
    tracks = tuple(
        Track(0, TrackKind.DEVICE, "", block=block, warp=warp) for block in range(blocks) for warp in range(warps)
    )
    each, none = np.arange(len(tracks)), np.zeros(len(tracks), np.int32)
    spans = Spans(each.astype(np.int32), none, none, each, each + 5, none.astype(np.uint64), none.astype(np.uint64))
    timeline = make_timeline(1).replace(tracks=tracks, spans=spans, flows=Flows(), marks=Marks())
    rows = lay_out(timeline, np.ones(len(tracks), bool)).rows
    assert max(row.order for row in rows) < 1 << 31
    (group,) = (row for row in rows if row.name == "blocks")
    of_blocks = [row.order for row in rows if row.parent_uuid == group.uuid]
    assert len(of_blocks) == blocks
    assert of_blocks == sorted(set(of_blocks))


def test_backward_flow_is_counted_not_drawn(tmp_path: Path):
    timeline = make_timeline()
    late = timeline.spans.start.copy()
    signals = np.unique(timeline.flows.signal)
    late[signals] += 10_000
    end = timeline.spans.end.copy()
    end[signals] += 10_000
    spans = make_spans(
        zip(*(getattr(timeline.spans.take(slice(None)), name) for name in ("track", "event", "launch")), late, end,
            timeline.spans.begin_payload, timeline.spans.end_payload, strict=True)
    )  # fmt: skip
    signal = np.flatnonzero(spans.start > 10_000)
    flows = Flows(signal, np.full(len(signal), np.flatnonzero(spans.event == WAIT)[0]))
    path = tmp_path / "trace.pftrace"
    stats = write_perfetto(timeline.replace(spans=spans, flows=flows), path)
    assert (stats.flows, stats.flows_left_out) == (0, len(signal))
    assert_no_loss(TraceProcessor(path))


def test_gzip_is_one_plain_member(tmp_path: Path):
    timeline = make_timeline()
    write_perfetto(timeline, tmp_path / "a.pftrace.gz")
    write_perfetto(timeline, tmp_path / "a.pftrace")
    assert gzip.decompress((tmp_path / "a.pftrace.gz").read_bytes()) == (tmp_path / "a.pftrace").read_bytes()


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path):
    pipe = tmp_path / "pipe.pftrace"
    os.mkfifo(pipe)
    with pytest.raises(BadInput, match="not a regular file"):
        write_perfetto(make_timeline(), pipe)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_file_that_cannot_grow_leaves_nothing(tmp_path: Path):
    """A size limit stands in for a full disk: the write itself fails, after the file was opened."""
    path = tmp_path / "trace.pftrace"
    program = (
        "import resource, timelines, tracekern.errors\n"
        "from tracekern.export.formats.perfetto import write_perfetto\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        f"    write_perfetto(timelines.make_timeline(), {str(path)!r})\n"
        "except tracekern.errors.BadInput as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.getcwd()])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == f"cannot write {path}: File too large; nothing was left there\n"
    assert list(tmp_path.iterdir()) == []


def test_names_of_one_rank_are_not_repeated_for_the_others(tmp_path: Path):
    """A trace of four times the ranks, each with host ranges and launches of its own, is four times as large."""

    def size(num_ranks: int) -> int:
        timeline = make_timeline(num_ranks)
        names = tuple(f"step {number}" for number in range(200 * num_ranks))
        host = [i for i, track in enumerate(timeline.tracks) if track.kind is TrackKind.HOST]
        launches = tuple(
            make_launch(rank, f"kernel {rank}", 1000 * rank + i) for rank in range(num_ranks) for i in range(200)
        )
        lanes = [
            i
            for i, track in enumerate(timeline.tracks)
            if track.kind is TrackKind.DEVICE and not track.block + track.warp
        ]
        rows = [
            (track, HOST, -1, 10 * i, 10 * i + 5, 200 * rank + i, 0)
            for rank, track in enumerate(host)
            for i in range(200)
        ]
        rows += [
            (track, COPY, 200 * rank + i, 10 * i, 10 * i + 5, 0, 0)
            for rank, track in enumerate(lanes)
            for i in range(200)
        ]
        timeline = timeline.replace(spans=make_spans(rows), flows=Flows(), launches=launches, host_names=names)
        check_picture(timeline, tmp_path / "trace.pftrace")
        return (tmp_path / "trace.pftrace").stat().st_size

    assert size(8) < 4.2 * size(2)
