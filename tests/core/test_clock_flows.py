"""What flows prove of the clocks, on flows between simulated clocks whose truth is known."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from clock_exchanges import SECOND, Clock, rank_of, sample
from hypothesis import given
from hypothesis import strategies as st

from tests.captures import CaptureSpec, write_capture
from tracekern.analysis.questions.summary import summarize
from tracekern.cli.commands.info import clock as clock_text
from tracekern.timeline.clocks.fit import apply_clock, fit_clocks
from tracekern.timeline.clocks.flow_bounds import tighten_clocks
from tracekern.timeline.load import load
from tracekern.timeline.model import (
    Channel,
    ChannelKind,
    EventClass,
    EventType,
    Field,
    Flows,
    Launch,
    Spans,
    Timeline,
    Track,
    TrackKind,
)

SIGNAL, WAIT, WORK = range(3)
BOTH = ((0, 1), (1, 0))


@dataclass
class Run:
    """Flows between clocks, in true time (ns), and the Timeline that a merge makes of them."""

    clocks: dict[int, Clock]
    samples: np.ndarray
    kind: ChannelKind = ChannelKind.DATA
    wait_names_peer: bool = True
    clock_ids: dict[int, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows: list[tuple[int, int, float]] = []  # rank, event, true time
        self.edges: list[tuple[int, int]] = []

    def flows(self, pairs: tuple[tuple[int, int], ...], times: np.ndarray, latency_ns: np.ndarray) -> None:
        """A flow for each pair and time; the wait ends latency_ns after the signal began."""
        for (source, destination), (time, latency) in itertools.product(pairs, zip(times, latency_ns, strict=True)):
            self.edges.append((len(self.rows), len(self.rows) + 1))
            self.rows += [(source, SIGNAL, time), (destination, WAIT, time + latency)]

    def work(self, rank: int, time: float) -> None:
        self.rows.append((rank, WORK, time))

    def timeline(self) -> Timeline:
        """One span for each row: a signal begins at its time, a wait ends there."""
        rank, event, time = (np.array(column) for column in zip(*self.rows, strict=True))
        ticks = np.select([rank == one for one in self.clocks], [clock.ticks(time) for clock in self.clocks.values()])
        ranks = [rank_of(one, clock, clock_id=self.clock_ids.get(one, "")) for one, clock in self.clocks.items()]
        spans = {one: (int(ticks[rank == one].min()), int(ticks[rank == one].max())) for one in set(rank.tolist())}
        fits = fit_clocks(self.samples, ranks, spans)
        axis = np.select([rank == one for one in fits], [apply_clock(fit, ticks) for fit in fits.values()])
        origin = int(axis.min()) - 100
        order = np.argsort(rank, kind="stable")
        place = np.argsort(order)
        signal, wait = (place[list(column)] for column in zip(*self.edges, strict=True))
        channel = Channel("token", self.kind, ())
        wait_fields = (Field("peer", 10),) if self.wait_names_peer else ()
        self.places = place
        return Timeline(
            unit="ns",
            ranks=tuple(dataclasses.replace(about, clock=fits[about.rank]) for about in ranks),
            tracks=tuple(Track(one, TrackKind.DEVICE, "warp") for one in self.clocks),
            events=(
                EventType("signal_token", EventClass.SIGNAL, "completion", channel, (Field("peer", 10),)),
                EventType("wait_token", EventClass.WAIT, "completion", channel, wait_fields),
                EventType("copy_token", EventClass.WORK, "issue"),
            ),
            launches=tuple(Launch(one, 0, "dispatch", 0, 0, 1, 1, 1, 1, 99, 0, 9) for one in self.clocks),
            spans=Spans(
                track=rank[order].astype(np.int32),
                event=event[order].astype(np.int32),
                launch=rank[order].astype(np.int32),
                start=axis[order] - origin - np.where(event[order] == WAIT, 50, 0),
                end=axis[order] - origin + np.where(event[order] == WAIT, 0, 50),
                begin_payload=np.zeros(len(rank), np.uint64),
                end_payload=np.zeros(len(rank), np.uint64),
            ),
            flows=Flows(signal, wait),
            origin_ns=origin,
        )

    def errors_ns(self, timeline: Timeline, rank: int) -> np.ndarray:
        """[n] where the events of a rank stand minus where they truly belong."""
        rows = [(place, row) for place, row in zip(self.places.tolist(), self.rows, strict=True) if row[0] == rank]
        at = np.array([place for place, _ in rows])
        is_wait = timeline.spans.event[at] == WAIT
        axis = np.where(is_wait, timeline.spans.end[at], timeline.spans.start[at]) + timeline.origin_ns
        reference = next(about.rank for about in timeline.ranks if about.clock.method == "reference")
        clock = self.clocks[reference]
        return axis - clock.base_ns - clock.ns(np.array([time for _, (_, _, time) in rows]))


def two_ranks(path_ns: float = 5_000.0, num_ranks: int = 2, seed: int = 1, **changes: object) -> Run:
    """Round trips so slow that flows know better."""
    rng = np.random.default_rng(seed)
    clocks = {rank: Clock.draw(rng) for rank in range(num_ranks)}
    return Run(clocks, sample(rng, clocks, [0, 3 * SECOND], path_ns=path_ns, quiet=1.0), **changes)


def tightened(timeline: Timeline) -> list[float]:
    ranks, problems = tighten_clocks(timeline)
    assert problems == ()
    return [rank.clock.hard_ns for rank in ranks]


@given(
    seed=st.integers(0, 2**32),
    num_ranks=st.integers(2, 5),
    num_rounds=st.integers(1, 3),
    forward=st.sampled_from([0, 300, 6_000]),
    latency_ns=st.sampled_from([0, 100, 3_000]),
    jitter_ns=st.sampled_from([1, 500]),
    density=st.sampled_from([0.2, 0.6, 1.0]),
    coarse=st.booleans(),
)
def test_truth_stays_within_a_bound_that_never_widens(
    seed, num_ranks, num_rounds, forward, latency_ns, jitter_ns, density, coarse
):
    rng = np.random.default_rng(seed)
    kind = {"ticks_per_second": 100_000_000, "resolution_ticks": 1} if coarse else {}
    clocks = {rank: Clock.draw(rng, **kind) for rank in range(num_ranks)}
    samples = sample(rng, clocks, [k * 2.5 * SECOND for k in range(num_rounds)], count=40, quiet=0.8)
    # The way there is longer: the fit is off by half of that, and flows may prove it.
    for column in ("t1", "t2", "t3"):
        samples[column] += int(forward * clocks[0].ticks_per_second / SECOND)
    run = Run(clocks, samples)
    for launch in rng.uniform(-0.2, num_rounds * 2.5, 4) * SECOND:
        pairs = tuple(pair for pair in itertools.permutations(clocks, 2) if rng.random() < density)
        run.flows(pairs, launch + rng.uniform(0, 3e5, 12), latency_ns + rng.exponential(jitter_ns, 12))
    for rank in clocks:
        run.work(rank, rng.uniform(0, num_rounds * 2.5) * SECOND)
    if not run.edges:
        return
    timeline = run.timeline()
    ranks, problems = tighten_clocks(timeline)
    assert {problem.kind for problem in problems} <= {"fit_outside_flows"}
    off = {problem.rank for problem in problems}
    for before, after in zip(timeline.ranks, ranks, strict=True):
        error = np.abs(run.errors_ns(timeline, after.rank)).max()
        if after.clock.method == "ping-pong":
            assert error <= after.clock.hard_ns
        assert after.clock.hard_ns <= before.clock.hard_ns
        assert after.clock.round_trip_ns in (None, before.clock.hard_ns)
        assert (after.clock.round_trip_ns is None) == (after.clock.hard_ns == before.clock.hard_ns)
        # As tuples: a NaN equals itself there, and in dataclasses only before Python 3.13.
        assert dataclasses.astuple(
            dataclasses.replace(after.clock, hard_ns=0, round_trip_ns=None, doubt_ns=0, is_checked=True)
        ) == dataclasses.astuple(dataclasses.replace(before.clock, hard_ns=0, is_checked=True))
        assert after.clock.doubt_ns == (after.clock.hard_ns if after.rank in off else 0)
        if after.rank in off:
            assert error > 0


def test_flows_of_both_directions_bound_a_pair_by_the_fastest():
    run = two_ranks()
    run.flows(BOTH, SECOND + np.arange(20) * 1e4, 100 + np.arange(20) * 1000.0)
    timeline = run.timeline()
    assert timeline.ranks[1].clock.hard_ns > 5_000
    ranks, problems = tighten_clocks(timeline)
    assert problems == ()
    error = np.abs(run.errors_ns(timeline, 1)).max()
    # The fastest flow takes 100 ns: with the error of the fit, a tick more for each stamp, twice.
    assert error <= ranks[1].clock.hard_ns <= 100 + error + 4 * 32 + 10
    assert ranks[1].clock.round_trip_ns == timeline.ranks[1].clock.hard_ns
    assert ranks[0] == timeline.ranks[0]


def test_a_ring_of_flows_bounds_all_ranks_of_it():
    run = two_ranks(num_ranks=4)
    run.flows(((0, 1), (1, 2), (2, 0)), SECOND + np.arange(5) * 1e4, np.full(5, 200.0))
    run.work(3, SECOND)
    before, after = [rank.clock.hard_ns for rank in run.timeline().ranks], tightened(run.timeline())
    assert max(after[1:3]) < 1_500 < 5_000 < min(before[1:])
    assert after[3] == before[3]


@pytest.mark.parametrize("sign", [1, -1])
def test_flows_far_away_in_time_prove_what_the_drift_leaves(sign):
    """Before and after them, wherever on the axis."""
    hard_ns = []
    for away in (0.0, 0.1, 1.2):
        run = two_ranks()
        run.work(0, 0)
        run.flows(BOTH, 1.5 * SECOND + np.arange(5) * 1e4, np.full(5, 100.0))
        run.work(1, (1.5 + sign * away) * SECOND)
        timeline = run.timeline()
        hard_ns.append(tightened(timeline)[1])
        drift = timeline.ranks[1].clock.rate_error * away * SECOND
        assert hard_ns[-1] == pytest.approx(min(hard_ns[0] + drift, timeline.ranks[1].clock.hard_ns), abs=10)
    assert hard_ns[0] < hard_ns[1] < hard_ns[2]


def test_a_fit_outside_what_flows_prove_is_reported_and_its_bound_stays_honest():
    run = two_ranks()
    for column in ("t1", "t2", "t3"):
        run.samples[column] += 4_000
    run.flows(BOTH, SECOND + np.arange(20) * 1e4, np.full(20, 100.0))
    timeline = run.timeline()
    error = np.abs(run.errors_ns(timeline, 1)).max()
    assert error > 1_500
    ranks, (problem,) = tighten_clocks(timeline)
    assert error <= ranks[1].clock.hard_ns < timeline.ranks[1].clock.hard_ns
    assert (problem.severity, problem.kind, problem.rank) == ("warning", "fit_outside_flows", 1)
    proven = 1_000 * float(problem.text.split("at least ")[1].split(" us")[0])
    assert error - 300 < proven < error + 5, "of three digits"
    assert "rank 1" in problem.text
    assert "rank 0" in problem.text
    assert problem.text.endswith("clock samples travel faster one way than the other")


def test_a_reversed_flow_contradicts_and_tightens_nothing():
    run = two_ranks(num_ranks=3)
    run.flows((*BOTH, (1, 2), (2, 1)), SECOND + np.arange(20) * 1e4, np.full(20, 100.0))
    run.flows(((2, 1),), np.array([1.001 * SECOND]), np.array([-900.0]))
    timeline = run.timeline()
    ranks, (problem,) = tighten_clocks(timeline)
    hard_ns = [rank.clock.hard_ns for rank in timeline.ranks]
    assert [rank.clock.hard_ns for rank in ranks] == hard_ns
    assert [rank.clock.doubt_ns for rank in ranks] == hard_ns, "what contradicts is not likely right"
    assert problem.text.endswith("; hard_ns is that of the round trips")
    assert (problem.severity, problem.kind, problem.rank) == ("error", "contradicting_flows", 1)
    assert "ranks 1 and 2 contradict" in problem.text
    # 900 ns back, and 100 ns that the fastest flow the other way takes; ticks may hide 3 of 32 ns.
    assert 700 <= int(problem.text.split("allow by ")[1].split(" ns")[0]) <= 800


@pytest.mark.parametrize("kind", list(ChannelKind))
@pytest.mark.parametrize("names_peer", [True, False])
def test_only_waits_that_one_signal_can_release_prove_anything(kind, names_peer):
    run = two_ranks(kind=kind, wait_names_peer=names_peer)
    run.flows(BOTH, SECOND + np.arange(5) * 1e4, np.full(5, 100.0))
    timeline = run.timeline()
    proves = kind is ChannelKind.BARRIER or (kind is ChannelKind.DATA and names_peer)
    assert (tightened(timeline)[1] < timeline.ranks[1].clock.hard_ns) == proves


@pytest.mark.parametrize("loss", ["records_lost", "records_overwritten", "stamp_error_ns"])
def test_launches_that_lost_records_or_count_cycles_prove_nothing(loss):
    run = two_ranks()
    run.flows(BOTH, SECOND + np.arange(5) * 1e4, np.full(5, 100.0))
    timeline = run.timeline()
    lossy = tuple(dataclasses.replace(launch, **{loss: launch.rank}) for launch in timeline.launches)
    assert tighten_clocks(timeline.replace(launches=lossy)) == (timeline.ranks, ())


def test_nothing_to_tighten():
    run = two_ranks()
    run.flows(BOTH, SECOND + np.arange(5) * 1e4, np.full(5, 100.0))
    timeline = run.timeline()
    for other in (timeline.replace(aligned=False), timeline.replace(flows=Flows()), Timeline("ns", (), (), (), ())):
        assert tighten_clocks(other) == (other.ranks, ())


def test_a_rank_on_which_nothing_ran_keeps_its_bound():
    run = two_ranks()
    run.flows(BOTH, SECOND + np.arange(5) * 1e4, np.full(5, 100.0))
    alone = tightened(run.timeline())
    timeline = run.timeline()
    idle = dataclasses.replace(timeline.ranks[1], rank=2)
    assert tightened(timeline.replace(ranks=(*timeline.ranks, idle))) == [*alone, idle.clock.hard_ns]


def test_merge_tightens_and_info_says_so(tmp_path: Path):
    capture = write_capture(tmp_path, CaptureSpec(num_ranks=2, path_ns=3000))
    timeline = load(capture)
    clock = timeline.ranks[1].clock
    # A flow of the capture takes 500 ns each way.
    assert 500 < clock.hard_ns < 510
    assert clock.round_trip_ns is not None
    assert 3000 < clock.round_trip_ns < 3100
    reference, other = summarize(timeline).ranks
    assert (reference.clock_round_trip_ns, other.clock_round_trip_ns) == (None, clock.round_trip_ns)
    assert clock_text(other).startswith(f"ping-pong ±{clock.hard_ns:.0f} ns by flows, ±3.00 us without, sigma")
    assert load(capture, unaligned=True).ranks[1].clock.hard_ns == float("inf")


def test_ranks_of_one_clock_are_tightened_together():
    """Rank 2 reads the clock of rank 1 and exchanges nothing with rank 0, or all that there is."""
    bounds = []
    for other in (1, 2):
        run = two_ranks()
        run.clocks[2] = run.clocks[1]
        run.clock_ids = {1: "GPU b", 2: "GPU b"}
        run.flows(((0, other), (other, 0)), SECOND + np.arange(20) * 1e4, 100 + np.arange(20) * 1000.0)
        run.flows(((1, 2), (2, 1)), SECOND + np.arange(20) * 1e4, np.full(20, 40.0))
        run.work(3 - other, SECOND)
        timeline = run.timeline()
        ranks, problems = tighten_clocks(timeline)
        assert problems == ()
        assert repr(vars(ranks[1].clock)) == repr(vars(ranks[2].clock))
        bounds.append(ranks[1].clock.hard_ns)
    assert bounds[0] == bounds[1] < 500 < 5_000 < timeline.ranks[1].clock.hard_ns


def test_a_reversed_flow_within_a_clock_says_nothing_of_clocks():
    run = two_ranks()
    run.clocks[2] = run.clocks[1]
    run.clock_ids = {1: "GPU b", 2: "GPU b"}
    run.flows(BOTH, SECOND + np.arange(20) * 1e4, np.full(20, 100.0))
    alone = tightened(run.timeline())[1]
    run.flows(((2, 1),), np.array([SECOND + 1e5]), np.array([-900.0]))
    assert tightened(run.timeline())[1:] == [alone, alone]


def test_a_clock_that_flows_prove_off_is_told_once():
    run = two_ranks()
    for column in ("t1", "t2", "t3"):
        run.samples[column] += 4_000
    run.clocks[2] = run.clocks[1]
    run.clock_ids = {1: "GPU b", 2: "GPU b"}
    run.flows(((0, 2), (2, 0)), SECOND + np.arange(20) * 1e4, np.full(20, 100.0))
    _, (problem,) = tighten_clocks(run.timeline())
    assert (problem.kind, problem.rank) == ("fit_outside_flows", 1)
