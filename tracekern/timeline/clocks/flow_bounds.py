"""Tightens what is known of the clocks by the flows between ranks: a wait never ends before its signal begins.

A flow is a proof of order, not a sample: it moves no time stamp. It narrows `hard_ns`, and widens it only where it
contradicts it. Let d(r) be the place of
clock r on the axis minus its true place. A flow from s to r then proves d(r) - d(s) <= end of wait - start of signal,
and one tick of r, for which the end stands. Flows of both directions, the round trips and the slowness of the drift are
edges of one graph over clocks and time, and its shortest paths bound every d. Ranks that read the same clock are one
node of it, and flows between them prove nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.formatting import duration
from tracekern.timeline.clocks.fit import lowest_readers
from tracekern.timeline.clocks.steadiness import COVERED_SIGMAS
from tracekern.timeline.columns import parts_by_track
from tracekern.timeline.join.flows import lossy_launches, stamp_errors_ns
from tracekern.timeline.model import (
    ChannelKind,
    EventClass,
    Float64,
    Int32,
    Int64,
    Problem,
    Rank,
    Timeline,
    clocks_of_ranks,
)

Bools = npt.NDArray[np.bool_]

_MAX_BOUNDS = 1 << 20
"""Windows times pairs of clocks; as float64, 8 MB."""
_MIN_WINDOW_BITS = 15
_CHECKED_BOUNDS = 2.0
"""Flows check a clock where they would show an error of so many times its bound."""
_CANNOT_CARRY = 1.0
"""Rate of a clock of which one window says nothing about another, ns per ns."""
_ROUNDING_NS = 1.0
"""Both ends of a flow are whole ns."""


def tighten_clocks(timeline: Timeline, proven: Proven | None = None) -> tuple[tuple[Rank, ...], tuple[Problem, ...]]:
    """The ranks with `hard_ns` as flows and round trips together prove it, and what contradicts.

    timeline: in ns. proven: by the flows of all its parts; without, by its own. A fit that lies outside what the flows
    prove is a warning, and the bound reaches to the far end of what they leave. Flows that cannot all be true within
    the bounds of the clocks tighten nothing, and are an error; bounds grow until the flows of every window are.
    """
    reference = _reference_of(timeline)
    if reference is None:
        return timeline.ranks, ()
    proven = proven or Proven.of(timeline, last_event_ns(timeline))
    if not proven.num_flows:
        return timeline.ranks, ()
    graph = _Graph.of(timeline, _readers(timeline), reference, proven)
    of_windows = graph.at_most(proven)
    carried = graph.carried(of_windows)
    at_most = graph.with_round_trips(carried)
    for via in (graph.reference, *np.delete(np.arange(graph.num_clocks), graph.reference).tolist()):
        at_most = _over(at_most, via)
        round_trip = np.diagonal(at_most, axis1=1, axis2=2).min(axis=0)
        if round_trip.min(initial=0.0) < -_ROUNDING_NS:
            suspects = {via, *np.flatnonzero(round_trip < -_ROUNDING_NS).tolist()}
            pair = (int(np.argmin(round_trip)), via)
            return _contradicted(timeline, graph, of_windows, suspects, pair, -float(round_trip.min()))
    upper, lower = at_most[:, graph.reference, :], -at_most[:, :, graph.reference]
    place_of = _places(timeline)
    found = [_outside(timeline, graph, place, upper, lower) for place in range(graph.num_clocks)]
    checked = graph.are_checked(carried)
    ranks = []
    for rank in timeline.ranks:
        place = place_of[rank.rank]
        bound = graph.hard_ns(place, upper, lower)
        ranks.append(_tightened(rank, bound, is_outside=found[place] is not None, is_checked=bool(checked[place])))
    return tuple(ranks), tuple(problem for problem in found if problem)


def can_tighten(timeline: Timeline) -> bool:
    """Whether flows may say something of its clocks: there are several, on one axis."""
    return _reference_of(timeline) is not None


def _reference_of(timeline: Timeline) -> int | None:
    """Place in _Graph.readers; None where nothing can be tightened."""
    readers = _readers(timeline)
    found = [place for place, rank in enumerate(readers) if rank.clock and rank.clock.method == "reference"]
    return found[0] if timeline.aligned and len(found) == 1 and len(readers) > 1 else None


@dataclass(frozen=True)
class _Proofs:
    """[n] flows between two clocks: places of both in _Graph.readers, and what each proves."""

    source: Int64
    destination: Int64
    signalled: Int64
    ended: Int64
    bound: Float64
    """ns that d(destination) at `ended` exceeds d(source) at `signalled` by at most."""

    @classmethod
    def of(cls, timeline: Timeline) -> _Proofs:
        spans, flows = timeline.spans, timeline.flows
        place = _places(timeline)[timeline.track_ranks()]
        source, destination = place[spans.track[flows.signal]], place[spans.track[flows.wait]]
        proves = (source != destination) & _names_its_signal(timeline)[spans.event[flows.wait]]
        # What was lost may have been the signal that really came. That a core clock kept its rate is no proof.
        is_sound = np.append(~lossy_launches(timeline) & (stamp_errors_ns(timeline) == 0), False)
        for end in (flows.signal, flows.wait):
            proves &= is_sound[spans.launch[end]]  # without a launch it is by the host's clock
        signal, wait = flows.signal[proves], flows.wait[proves]
        source, destination = source[proves], destination[proves]
        signalled, ended = spans.start[signal], spans.end[wait]
        return cls(
            source, destination, signalled, ended, ended - signalled + _ticks_ns(timeline)[destination] + _ROUNDING_NS
        )


@dataclass(frozen=True)
class Proven:
    """What flows prove of the clocks in each window of time. Adds up over the parts of a run."""

    window_bits: int
    """A window is this power of two, ns."""
    num_flows: int
    at_most: Float64
    """[num_windows, num_clocks, num_clocks] least upper bounds of d column minus d row at the middle of the window."""
    occupied: Bools
    """[num_clocks, num_windows] whether a rank of the clock has a device event in the window."""

    @classmethod
    def of(cls, timeline: Timeline, last_ns: int) -> Proven:
        """last_ns: last_event_ns() of the whole run."""
        readers = _readers(timeline)
        bits, num_clocks = _MIN_WINDOW_BITS, len(readers)
        while (last_ns >> bits) + 1 > max(_MAX_BOUNDS // num_clocks**2, 1):
            bits += 1
        occupied = np.zeros((num_clocks, (last_ns >> bits) + 1), np.bool_)
        row = _places(timeline)[timeline.track_ranks()] * occupied.shape[1]
        for track, time in _device_events(timeline):
            occupied.reshape(-1)[row[track] + (time >> bits)] = True
        flows = _Proofs.of(timeline)
        at_most = np.full((occupied.shape[1], num_clocks, num_clocks), np.inf)
        rate = np.array([rank.clock.rate_error if rank.clock else 0.0 for rank in readers])
        window = flows.ended >> bits
        center = _center(window, bits)
        bound = flows.bound + rate[flows.destination] * np.abs(flows.ended - center)
        bound += rate[flows.source] * np.abs(flows.signalled - center)
        place = (window * num_clocks + flows.source) * num_clocks + flows.destination
        np.minimum.at(at_most.reshape(-1), place, bound)
        return cls(bits, len(flows.bound), at_most, occupied)

    def __add__(self, other: Proven) -> Proven:
        return Proven(
            self.window_bits,
            self.num_flows + other.num_flows,
            np.minimum(self.at_most, other.at_most),
            self.occupied | other.occupied,
        )


def _center(window: Int64, bits: int) -> Float64:
    """[n] ns"""
    return np.asarray(window + 0.5, np.float64) * float(1 << bits)


@dataclass(frozen=True)
class _Graph:
    """Windows of time in which a rank has events: k of them, in each a node for every clock."""

    readers: list[Rank]
    """The lowest rank of each clock."""
    reference: int
    prior: Float64
    """[num_clocks] what round trips prove of +-d."""
    rate: Float64
    """[num_clocks] d changes by no more, ns per ns."""
    is_steady: Bools
    """[num_clocks] False for a clock that may have jumped: what holds of it in one window says nothing of another."""
    tick: Float64
    window_bits: int
    """A window is this power of two, ns."""
    occupied: Bools
    """[num_clocks, k] whether a rank of the clock has events in the window."""
    center: Float64
    """[k] ns"""

    @property
    def num_clocks(self) -> int:
        return len(self.readers)

    @property
    def half(self) -> int:
        return 1 << (self.window_bits - 1)

    @classmethod
    def of(cls, timeline: Timeline, readers: list[Rank], reference: int, proven: Proven) -> _Graph:
        clocks = [rank.clock for rank in readers if rank.clock]
        tick = _ticks_ns(timeline)
        prior = np.array([clock.hard_ns for clock in clocks]) - tick - tick[reference]
        prior[reference] = 0.0
        seen = proven.occupied.any(axis=0)
        return cls(
            readers=readers,
            reference=reference,
            prior=prior,
            rate=np.array([clock.rate_error for clock in clocks]),
            is_steady=np.array([not clock.doubt_ns for clock in clocks]),
            tick=tick,
            window_bits=proven.window_bits,
            occupied=proven.occupied[:, seen],
            center=_center(np.flatnonzero(seen), proven.window_bits),
        )

    def at_most(self, proven: Proven) -> Float64:
        """[k, n, n] what flows of a window prove: least upper bounds of d column minus d row at its middle."""
        at_most = proven.at_most[proven.occupied.any(axis=0)]
        at_most[:, range(self.num_clocks), range(self.num_clocks)] = 0.0
        return at_most

    def carried(self, at_most: Float64) -> Float64:
        """[k, n, n] the same with what flows of all other windows prove.

        What holds in one window holds in another, but for what the two clocks may have drifted in between. Where a rank
        has no events yet, or no more, keep d constant: no flow is there, and all edges hold for that d too.
        """
        rate = np.where(self.is_steady, self.rate, _CANNOT_CARRY)
        drift = self.center[:, None, None] * (rate[:, None] + rate[None, :])
        before: Float64 = np.minimum.accumulate(at_most - drift, axis=0) + drift
        after: Float64 = np.minimum.accumulate((at_most + drift)[::-1], axis=0)[::-1] - drift
        return np.minimum(before, after)

    def with_round_trips(self, at_most: Float64) -> Float64:
        """[k, n, n] the same with what round trips prove."""
        at_most = at_most.copy()
        at_most[:, self.reference, :] = np.minimum(at_most[:, self.reference, :], self.prior)
        at_most[:, :, self.reference] = np.minimum(at_most[:, :, self.reference], self.prior)
        at_most[:, range(self.num_clocks), range(self.num_clocks)] = 0.0
        return at_most

    def are_checked(self, at_most: Float64) -> Bools:
        """[num_clocks] whether flows alone would show an error of _CHECKED_BOUNDS times the bound wherever a clock has
        events."""
        widest = np.maximum(at_most[:, self.reference, :], at_most[:, :, self.reference])
        widest = np.where(self.occupied.T, widest, 0.0).max(axis=0)
        return np.asarray(widest <= _CHECKED_BOUNDS * self.prior, np.bool_)

    def grown(self, at_most: Float64, suspects: set[int]) -> tuple[Float64, Int64]:
        """([num_clocks] +-d within which the flows of each window can be true, [num_clocks] the window of the largest).

        at_most: of at_most(). The bound of suspects is the far end of what flows of both directions leave. That of
        other clocks grows where flows prove more than round trips allow: to the far end of what they leave, or where
        they go one way only, by the whole width of the round trips. Flows of one window that contradict each other say
        nothing of clocks.
        """
        closed = at_most
        for via in range(self.num_clocks):
            closed = _over(closed, via)
        closed[np.diagonal(closed, axis1=1, axis2=2).min(axis=1) < -_ROUNDING_NS] = np.inf
        prior, window = self.prior.copy(), np.zeros(self.num_clocks, np.int64)
        for clock in suspects - {self.reference}:
            far = np.maximum(closed[:, self.reference, clock], closed[:, clock, self.reference])
            window[clock] = int(np.argmax(np.where(np.isfinite(far), far, 0.0)))
            prior[clock] = max(prior[clock], float(np.where(np.isfinite(far), far, 0.0).max()))
        order = [self.reference, *np.delete(np.arange(self.num_clocks), self.reference).tolist()]
        for one, other in itertools.combinations(order, 2):
            upper, lower, room = closed[:, one, other], -closed[:, other, one], prior[one] + prior[other]
            above = np.where(np.isfinite(upper), upper, lower + 2 * room)
            below = np.where(np.isfinite(lower), -lower, 2 * room - upper)
            reach = np.maximum(np.where(lower > room, above, 0.0), np.where(upper < -room, below, 0.0))
            worst = int(np.argmax(reach))
            for clock in {one, other} - {self.reference} if reach[worst] > room else ():
                prior[clock] += reach[worst] - room
                window[clock] = worst
        return prior, window

    def hard_ns(self, place: int, upper: Float64, lower: Float64) -> float:
        """The bound of a clock that holds in all windows in which its ranks have events; inf where flows say none."""
        seen = self.occupied[place]
        if place == self.reference or not seen.any():
            return float("inf")
        return self.at_all_times(place, float(np.maximum(upper[seen, place], -lower[seen, place]).max()))

    def at_all_times(self, place: int, widest: float) -> float:
        """`hard_ns` of a clock whose d is bounded at the middle of windows."""
        ticks = self.tick[place] + self.tick[self.reference]
        return float(widest + self.rate[place] * self.half + ticks + _ROUNDING_NS)


def _over(at_most: Float64, via: int) -> Float64:
    """[k, n, n] bounds, also over another clock (Floyd and Warshall)."""
    return np.minimum(at_most, at_most[:, :, via, None] + at_most[:, None, via, :])


def _tightened(rank: Rank, hard_ns: float, is_outside: bool, is_checked: bool) -> Rank:
    """The rank with that bound, if it is the narrower one. A fit outside what flows prove may be off by all of it."""
    clock = rank.clock
    if clock is None:
        return rank
    if hard_ns < clock.hard_ns:
        doubt_ns = min(clock.doubt_ns, hard_ns)
        clock = dataclasses.replace(
            clock, hard_ns=hard_ns, round_trip_ns=clock.hard_ns, doubt_ns=doubt_ns, is_checked=True
        )
    if is_outside:
        clock = dataclasses.replace(clock, doubt_ns=clock.hard_ns)
    if is_checked:
        clock = dataclasses.replace(clock, is_checked=True)
    return dataclasses.replace(rank, clock=clock)


def _contradicted(
    timeline: Timeline,
    graph: _Graph,
    of_windows: Float64,
    suspects: set[int],
    pair: tuple[int, int],
    excess_ns: float,
) -> tuple[tuple[Rank, ...], tuple[Problem, ...]]:
    """The ranks with bounds within which flows can be true, where those of a pair of clocks contradict theirs."""
    prior, window = graph.grown(of_windows, suspects)
    place_of, ranks, grew = _places(timeline), [], []
    for rank in timeline.ranks:
        place, clock = int(place_of[rank.rank]), rank.clock
        if clock is None or place == graph.reference or (place not in suspects and prior[place] == graph.prior[place]):
            ranks.append(rank)
            continue
        hard_ns = clock.hard_ns
        if prior[place] > graph.prior[place]:
            hard_ns = graph.at_all_times(place, float(prior[place]))
            if rank.rank == graph.readers[place].rank:
                at = duration(graph.center[window[place]])
                grew.append(f"rank {rank.rank} from {duration(clock.hard_ns)} to {duration(hard_ns)} (at {at})")
        ranks.append(dataclasses.replace(rank, clock=dataclasses.replace(clock, hard_ns=hard_ns, doubt_ns=hard_ns)))
    one, other = sorted(graph.readers[place].rank for place in pair)
    bounds = f"hard_ns grows: {', '.join(grew)}" if grew else "hard_ns is that of the round trips"
    text = (
        f"signals and waits of ranks {one} and {other} contradict what the clocks allow by {duration(excess_ns)}: a "
        f"wait ended before its signal began, or a clock was set; {bounds}"
    )
    return tuple(ranks), (Problem("error", "contradicting_flows", one, -1, text),)


def _readers(timeline: Timeline) -> list[Rank]:
    return lowest_readers(timeline.ranks, clocks_of_ranks(timeline.ranks))


def step_problems(timeline: Timeline) -> tuple[Problem, ...]:
    """A warning for every time in which rounds of samples show that a clock jumped. timeline: in ns."""
    readers = _readers(timeline)
    (reference,) = [rank.rank for rank in readers if rank.clock and rank.clock.method == "reference"] or [-1]
    problems = []
    for rank in readers:
        who = (
            f"the clock of rank {rank.rank}"
            if len(readers) > 2
            else f"one of the clocks of ranks {reference} and {rank.rank}"
        )
        for step in rank.clock.steps if rank.clock else ():
            begin, end = (f"{(at - timeline.origin_ns) / 1e9:.2f} s" for at in (step.begin_ns, step.end_ns))
            text = (
                f"{who} jumped by up to {duration(step.jump_ns)}, or changed its rate at once, between {begin} and "
                f"{end} of the trace: the rounds of samples around contradict each other; hard_ns covers it"
            )
            problems.append(Problem("warning", "clock_step", rank.rank, -1, text))
    return tuple(problems)


def _places(timeline: Timeline) -> Int64:
    """[largest rank + 2] place of each rank's clock in _Graph.readers."""
    place = {rank.rank: index for index, rank in enumerate(_readers(timeline))}
    return np.array([place.get(clock, -1) for clock in clocks_of_ranks(timeline.ranks).tolist()], np.int64)


def _ticks_ns(timeline: Timeline) -> Float64:
    return np.array([rank.resolution_ns for rank in _readers(timeline)])


def _names_its_signal(timeline: Timeline) -> Bools:
    """[num_events] whether a wait of that event cannot have been released by another signal than the one of its flow.

    A wait of `data` that names its peer waits for that one message; one at a `barrier` for all. Of `credit` the flow is
    the earliest signal on record that was enough, and that may be later than the one that came.
    """
    names = [
        event.channel is not None
        and event.event_class is EventClass.WAIT
        and (
            event.channel.kind is ChannelKind.BARRIER or (event.channel.kind is ChannelKind.DATA and event.has("peer"))
        )
        for event in timeline.events
    ]
    return np.array(names, bool)


def last_event_ns(timeline: Timeline) -> int:
    """The last time at which something began or ended on the device."""
    return max(int(time.max(initial=0)) for _, time in _device_events(timeline))


def _device_events(timeline: Timeline) -> Iterator[tuple[Int32, Int64]]:
    """Yields (track, time) of begins and ends on the device, and of marks, many at a time."""
    for _, spans in parts_by_track(timeline.spans):
        on_device = spans.launch >= 0
        yield spans.track[on_device], spans.start[on_device]
        closed = on_device & ~spans.is_open
        yield spans.track[closed], spans.end[closed]
    yield timeline.marks.track, timeline.marks.time


def _outside(timeline: Timeline, graph: _Graph, place: int, upper: Float64, lower: Float64) -> Problem | None:
    """The fit of a clock where the flows prove that it is off."""
    seen = graph.occupied[place]
    rank, reference = graph.readers[place], graph.readers[graph.reference]
    if rank.clock is None or not seen.any():
        return None
    beyond = np.maximum(lower[seen, place], -upper[seen, place]).max()
    # Noise of the samples, a jump that rounds show, and drift over the events explain this much.
    drift_ns = min(rank.clock.wander_ns, graph.rate[place] * np.ptp(graph.center[seen]))
    if beyond <= COVERED_SIGMAS * rank.clock.sigma_ns + rank.clock.doubt_ns + drift_ns:
        return None
    hard_ns = rank.clock.hard_ns
    why = "clock samples travel faster one way than the other"
    behind_samples_ns = graph.center[seen].max() + timeline.origin_ns - rank.clock.anchor_ns[-1]
    if rank.clock.rate_error * behind_samples_ns >= beyond:
        why = f"it was sampled long before, and its rate is known within {rank.clock.rate_error * 1e6:.2g} ppm only"
    text = (
        f"signals and waits prove the clock of rank {rank.rank} at least {duration(beyond)} off its fit to rank "
        f"{reference.rank} (round trips allow {duration(hard_ns)}): {why}"
    )
    return Problem("warning", "fit_outside_flows", rank.rank, -1, text)
