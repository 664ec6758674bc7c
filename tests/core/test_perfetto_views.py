"""The SQL that comes with tracekern, in Perfetto's own trace processor: the same numbers as tracekern.analysis."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from timelines import COPY, WAIT, make_launch, make_timeline, overwrite_begins
from trace_processor import Case

from tests.paths import TRACES
from tracekern.analysis.doubt import charge_ranks, most_charged
from tracekern.analysis.waits.analyze import WaitKind
from tracekern.analysis.waits.matrix import wait_matrix
from tracekern.analysis.waits.statistics import wait_statistics
from tracekern.timeline.facts.counters import count_events
from tracekern.timeline.facts.iterations import LaunchIterations
from tracekern.timeline.join.side_by_side import side_by_side
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, EventClass, Flows, TrackKind
from tracekern.timeline.select import select, take_spans
from tracekern.viewers import queries

WAIT_BY_RANK = "select rank, phase, waits, wait_ns, longest_ns, late_ns, drain_ns from tk_wait_by_rank"

UNASKED = "tk_staging", "tk_node_waits"
"""Views of sweeps with steps on record and of several nodes, which these captures lack: test_staging, test_nodes."""


BY_HAND = make_timeline(3)
MADE = {
    "by hand": BY_HAND,
    "odd name": BY_HAND.replace(launches=tuple(make_launch(rank, "layer #3 a.b", 10) for rank in range(3))),
    "flight recorder": overwrite_begins(BY_HAND, np.flatnonzero(BY_HAND.spans.event == COPY)[:5]),
}


@pytest.fixture(scope="module", params=["h200x4", "cpu_8_ranks", *MADE])
def case(request, tmp_path_factory) -> Case:
    timeline = MADE.get(request.param) or load(TRACES / request.param)
    return Case(timeline, tmp_path_factory.mktemp("views") / "trace.pftrace.gz")


def test_every_question_is_answered(case):
    for name in queries.names():
        assert case.query(queries.query(name)) or name in UNASKED, name


def test_files_can_be_pasted_whole_in_any_order_after_the_first(tmp_path):
    case = Case(BY_HAND, tmp_path / "trace.pftrace.gz")
    for name in queries.names():
        assert case.query((queries.FOLDER / f"{name}.sql").read_text()) or name in UNASKED


def test_each_wait_is_taken_apart_alike(case):
    rows = case.query("select ts, dur, late, drain, rest from tk_wait where signal_id is not null")
    waits, spans = case.waits, case.timeline.spans
    chosen = waits.signal >= 0
    shift = max(0, -int(spans.start.min()))
    columns = (spans.start[waits.row] + shift, waits.wait_ns, waits.late_ns, waits.drain_ns, waits.rest_ns)
    wanted = zip(*(column[chosen].tolist() for column in columns), strict=True)
    assert sorted(rows) == sorted(wanted)


def test_no_wait_is_missing(case):
    assert case.query("select count(*), sum(dur) from tk_wait") == [(len(case.waits), int(case.waits.wait_ns.sum()))]


def test_matrix(case):
    rows = case.query("select rank, peer, waits, wait_ns, late_ns, drain_ns from tk_wait_matrix")
    # What a trace shows no arrow for, barriers inside a block, cannot be attributed there.
    known = np.flatnonzero((case.waits.signal >= 0) | (case.waits.kind == WaitKind.UNMATCHED))
    wanted: dict[tuple[int, int], list[int]] = {}
    for row in known.tolist():
        cell = wanted.setdefault((int(case.waits.rank[row]), int(case.waits.peer[row])), [0, 0, 0, 0])
        values = (1, case.waits.wait_ns[row], case.waits.late_ns[row], case.waits.drain_ns[row])
        for place, value in enumerate(values):
            cell[place] += int(value)
    assert {(rank, peer): values for rank, peer, *values in rows} == wanted
    matrix = wait_matrix(case.timeline, case.waits)
    for rank, peer, _, wait_ns, *_ in rows:
        if rank != peer:
            assert matrix.sum_ns[matrix.ranks.index(rank), matrix.ranks.index(peer)] == wait_ns


def test_late_ranks(case):
    found = dict(case.query("select rank, late_ns from tk_late_ranks"))
    assert found == {
        blame.rank: blame.late_ns for blame in most_charged(charge_ranks(case.timeline, case.waits)) if blame.late_ns
    }


def test_wait_by_rank(case):
    found = {(rank, phase): tuple(rest) for rank, phase, *rest in case.query(WAIT_BY_RANK)}
    for entry in wait_statistics(case.waits, by=("rank", "phase")):
        waits, wait_ns, longest_ns, late_ns, drain_ns = found.pop((entry.rank, str(entry.phase)))
        assert (waits, wait_ns) == (entry.count, entry.sum_ns)
        chosen = (case.waits.rank == entry.rank) & (case.waits.phase == case.waits.phases.index(entry.phase))
        assert longest_ns == case.waits.wait_ns[chosen].max()
        late = sum(entry.by_class[name] for name in ("late_sender", "late_receiver"))
        assert (late_ns or 0, drain_ns or 0) == (late, entry.by_class["drain"])
    assert found == {}


def test_quantiles_of_phases(case):
    found = {
        phase: rest
        for phase, *rest in case.query("select phase, spans, total_ns, max_ns, p50_ns, p99_ns from tk_phases")
    }
    for entry in wait_statistics(case.waits, by=("phase",)):
        spans, total, _, p50, p99 = found[str(entry.phase)]
        assert (spans, total) == (entry.count, entry.sum_ns)
        assert (p50, p99) == pytest.approx((entry.p50_ns, entry.p99_ns))
    timeline, spans = case.timeline, case.timeline.spans
    for phase, (count, total, longest, p50, p99) in found.items():
        stage, name = phase.rsplit(".", 1)
        events = [i for i, event in enumerate(timeline.events) if event.name == name]
        launches = [i for i, launch in enumerate(timeline.launches) if launch.name == stage]
        chosen = np.isin(spans.event, events) & np.isin(spans.launch, launches) & (spans.end != OPEN_END)
        durations = (spans.end - spans.start)[chosen]
        assert (count, total, longest) == (len(durations), durations.sum(), durations.max())
        whole = (spans.end - spans.start)[chosen & ~timeline.headless_spans()]
        assert (p50, p99) == pytest.approx(tuple(np.quantile(whole, (0.5, 0.99))))


def test_the_slice_of_a_wait_says_what_released_it(case):
    timeline, waits, shift = case.timeline, case.waits, max(0, -int(case.timeline.spans.start.min()))
    spans, wanted = timeline.spans, []
    for row, signal in zip(waits.row.tolist(), waits.signal.tolist(), strict=True):
        if signal >= 0 and spans.end[row] > spans.start[signal]:
            track, event = timeline.tracks[spans.track[signal]], timeline.events[spans.event[signal]].name
            block = f"block {track.block:03} warp {track.warp:02} {track.role}".rstrip()
            wanted.append((int(spans.start[row]) + shift, f"rank {track.rank} {block}: {event}"))
    assert sorted(case.query("select ts, released_by from tk_wait where released_by is not null")) == sorted(wanted)


def test_longest_waits(case):
    """Those that another rank's signal ended come first, those of start-up last."""
    waits, spans, rank = case.waits, case.timeline.spans, case.timeline.track_ranks()
    at_start = LaunchIterations(case.timeline).is_start_up[waits.launch]
    is_released = (waits.signal >= 0) & (spans.end[waits.row] > spans.start[waits.signal])
    is_afar = is_released & (rank[spans.track[waits.signal]] != rank[spans.track[waits.row]])
    wanted = sorted(zip(at_start, ~is_afar & ~at_start, -waits.wait_ns, strict=True))[:100]
    assert case.query("select dur from tk_longest_waits") == [(-less,) for *_, less in wanted]


def test_waits_of_start_up_are_the_last_of_the_longest(tmp_path):
    """There are so few others here that the table, which lists 100, has room for those of start-up."""
    timeline = select(load(TRACES / "h200x4_late_host"), ranks=[2, 3])
    stages = np.append([launch.name for launch in timeline.launches], "")[timeline.spans.launch]
    kept = np.isin(stages, ["rank_barrier", "dispatch_send", ""])
    case = Case(take_spans(timeline, kept), tmp_path / "trace.pftrace")
    found = case.query("select phase = 'rank_barrier.wait_barrier', start_up = 1, dur from tk_longest_waits")
    is_barrier, at_start, dur = (list(column) for column in zip(*found, strict=True))
    number = sum(is_barrier)
    assert 0 < number < len(found) < 100
    assert is_barrier == [0] * (len(found) - number) + [1] * number
    assert [flag or 0 for flag in at_start] == is_barrier
    assert min(dur[:-number]) < max(dur[-number:]), "the longer of them are not first"


def test_long_waits_that_no_signal_ended_do_not_head_the_longest(tmp_path):
    """Nor those of their own rank. Rank 1 waits for rank 0, rank 0 for itself, and rank 2 for nobody on record."""
    made = make_timeline(3)
    ranks, flows = made.track_ranks()[made.spans.track], made.flows
    length = np.where(ranks == 1, 0, 50_000)
    spans = dataclasses.replace(made.spans, end=made.spans.end + length * (made.spans.event == WAIT))
    own = flows.signal[ranks[flows.signal] == 0][0]
    signal = np.where(ranks[flows.wait] == 0, own, flows.signal)
    kept = ranks[flows.wait] != 2
    case = Case(made.replace(spans=spans, flows=Flows(signal[kept], flows.wait[kept])), tmp_path / "trace.pftrace")
    found = case.query("select rank, substr(released_by, 1, 6), dur from tk_longest_waits")
    assert [rank for rank, *_ in found[:4]] == [1] * 4
    assert {(rank, by) for rank, by, _ in found} == {(1, "rank 0"), (0, "rank 0"), (2, None)}
    assert max(dur for rank, _, dur in found if rank == 1) < min(dur for rank, _, dur in found if rank != 1)
    assert len(found) == case.query("select count(*) from tk_wait")[0][0]


def test_kernels(case):
    rows = case.query("select kernel, rank, iteration, dur, later_ns from tk_kernels")
    timeline, spans = case.timeline, case.timeline.spans
    is_launch = np.array([event.event_class == EventClass.LAUNCH for event in timeline.events])[spans.event]
    kernels = [
        (timeline.launches[spans.launch[i]], int(spans.start[i]), int(spans.end[i] - spans.start[i]))
        for i in np.flatnonzero(is_launch & (spans.launch >= 0)).tolist()
    ]
    if timeline.aligned and len({launch.sequence for launch, *_ in kernels}) > 1:  # by hand: no field `sequence` is set
        first: dict[tuple[str, int], int] = {}
        for launch, start, _ in kernels:
            key = launch.name, launch.sequence
            first[key] = min(start, first.get(key, start))
        wanted = [
            (launch.name, launch.rank, launch.sequence, dur, start - first[launch.name, launch.sequence])
            for launch, start, dur in kernels
        ]
        assert sorted(rows) == sorted(wanted)


def test_counters_and_stalled_warps(case):
    drawn: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for rank, name, ts, value in case.query(
        "select t.rank, n.name, c.ts, c.value from counter c join tk_track t using (track_id) "
        "join track n on n.id = c.track_id order by c.ts"
    ):
        drawn.setdefault((rank, name), []).append((ts, value))
    counted = {(counter.rank, counter.name): counter for counter in count_events(case.timeline)}
    assert drawn == {
        key: list(zip(counter.time.tolist(), map(float, counter.value.tolist()), strict=True))
        for key, counter in counted.items()
    }
    most = dict(case.query("select rank, most from tk_stalled_warps"))
    assert most == {rank: int(c.value.max()) for (rank, name), c in counted.items() if name == "stalled warps"}
    mean = dict(case.query("select rank, mean from tk_stalled_warps"))
    spans = case.timeline.spans
    for rank, value in mean.items():
        tracks = [i for i, t in enumerate(case.timeline.tracks) if t.rank == rank and t.kind == TrackKind.DEVICE]
        is_wait = np.array([event.event_class == EventClass.WAIT for event in case.timeline.events])[spans.event]
        stalled = (spans.end - spans.start)[is_wait & np.isin(spans.track, tracks)].sum()  # none nested, none open
        duration = case.processor.scalar("select trace_end() - trace_start()")
        assert value == pytest.approx(stalled / duration)


COUNTED = {
    "tk_wait": "rank, row, phase, iteration, dur, peer, late, drain, rest",
    "tk_wait_matrix": "rank, peer, waits, wait_ns, late_ns, drain_ns",
    "tk_late_ranks": "rank, waits, late_ns, longest_ns",
    "tk_wait_by_rank": "rank, phase, waits, wait_ns, longest_ns, late_ns, drain_ns",
    "tk_phases": "phase, class, spans, total_ns, max_ns, p50_ns, p99_ns",
    "tk_kernels": "kernel, rank, iteration, dur, later_ns",
    "tk_stalled_warps": "rank, most",
}


def test_two_captures_side_by_side_keep_their_own_numbers(tmp_path):
    captures = [load(TRACES / name) for name in ("h200x4", "h200x4_late_host")]
    both = Case(side_by_side(*captures), tmp_path / "both.pftrace")
    for side, capture in zip("AB", captures, strict=True):
        alone = Case(capture, tmp_path / f"{side}.pftrace")
        for view, columns in COUNTED.items():
            wanted = sorted(alone.query(f"select {columns} from {view} where side = ''"), key=repr)
            assert wanted
            found = both.query(f"select {columns} from {view} where side = '{side}'")
            assert sorted(found, key=repr) == wanted, view
    assert {side for (side,) in both.query("select distinct side from tk_longest_waits")} <= {"A", "B"}


def test_rows_that_speak_of_ranks_are_none(tmp_path):
    """A host thread may be called anything."""
    timeline = make_timeline(2)
    named = [dataclasses.replace(t, name="of rank 7") if t.kind is TrackKind.HOST else t for t in timeline.tracks]
    case = Case(timeline.replace(tracks=tuple(named), title="like rank 9"), tmp_path / "trace.pftrace")
    assert case.query("select distinct rank, side from tk_track where row = 'of rank 7' order by 1") == [
        (0, ""),
        (1, ""),
    ]
    assert case.query("select rank, side from tk_track where row glob 'tracekern: *'") == [(None, "")]
