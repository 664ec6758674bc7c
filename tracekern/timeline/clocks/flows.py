"""Tightens what is known of the clocks by the flows between ranks: a wait never ends before its signal begins.

A flow is a proof of order, not a sample: it moves no time stamp and narrows `hard_ns` only. Let d(r) be the place of
clock r on the axis minus its true place. A flow from s to r then proves d(r) - d(s) <= end of wait - start of signal,
and one tick of r, for which the end stands. Flows of both directions, the round trips and the slowness of the drift are
edges of one graph over clocks and time, and its shortest paths bound every d. Ranks that read the same clock are one
node of it, and flows between them prove nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.formatting import duration
from tracekern.timeline.clocks.fit import lowest_readers
from tracekern.timeline.model import (
    OPEN_END,
    ChannelKind,
    EventClass,
    Float64,
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
_LIKELY_SIGMAS = 3.0
_ROUNDING_NS = 1.0
"""Both ends of a flow are whole ns."""


def tighten_clocks(timeline: Timeline) -> tuple[tuple[Rank, ...], tuple[Problem, ...]]:
    """The ranks with `hard_ns` as flows and round trips together prove it, never wider, and what contradicts.

    timeline: in ns, with its flows. A fit that lies outside what the flows prove is a warning, and the bound reaches to
    the far end of what they leave. Flows that cannot all be true tighten nothing, and are an error.
    """
    readers = _readers(timeline)
    reference = [place for place, rank in enumerate(readers) if rank.clock and rank.clock.method == "reference"]
    flows = _Proofs.of(timeline)
    if not timeline.aligned or len(reference) != 1 or not len(flows.bound):
        return timeline.ranks, ()
    graph = _Graph.of(timeline, readers, reference[0])
    at_most = graph.at_most(flows)
    for via in (graph.reference, *np.delete(np.arange(graph.num_clocks), graph.reference).tolist()):
        at_most = np.minimum(at_most, at_most[:, :, via, None] + at_most[:, None, via, :])
        round_trip = np.diagonal(at_most, axis1=1, axis2=2)
        if round_trip.min(initial=0.0) < -_ROUNDING_NS:
            place = int(np.argmin(round_trip.min(axis=0)))
            excess_ns = -float(round_trip.min())
            return timeline.ranks, (_contradiction(readers[place].rank, readers[via].rank, excess_ns),)
    upper, lower = at_most[:, graph.reference, :], -at_most[:, :, graph.reference]
    hard_ns = [graph.hard_ns(place, upper, lower) for place in range(graph.num_clocks)]
    place_of = _places(timeline)
    ranks = [_tightened(rank, hard_ns[place_of[rank.rank]]) for rank in timeline.ranks]
    found = [_outside(timeline, graph, place, upper, lower) for place in range(graph.num_clocks)]
    return tuple(ranks), tuple(problem for problem in found if problem)


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
        is_sound = [
            not (launch.records_lost or launch.records_overwritten or launch.stamp_error_ns)
            for launch in timeline.launches
        ]
        for end in (flows.signal, flows.wait):
            proves &= np.array(is_sound, bool)[spans.launch[end]]
        signal, wait = flows.signal[proves], flows.wait[proves]
        source, destination = source[proves], destination[proves]
        signalled, ended = spans.start[signal], spans.end[wait]
        return cls(
            source, destination, signalled, ended, ended - signalled + _ticks_ns(timeline)[destination] + _ROUNDING_NS
        )


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
    tick: Float64
    window_bits: int
    """A window is this power of two, ns."""
    occupied: Bools
    """[num_clocks, k] whether a rank of the clock has events in the window."""
    knot: Int64
    """[num_windows] number of the window among those with events."""
    center: Float64
    """[k] ns"""

    @property
    def num_clocks(self) -> int:
        return len(self.readers)

    @property
    def half(self) -> int:
        return 1 << (self.window_bits - 1)

    @classmethod
    def of(cls, timeline: Timeline, readers: list[Rank], reference: int) -> _Graph:
        clocks = [rank.clock for rank in readers if rank.clock]
        tick = _ticks_ns(timeline)
        prior = np.array([clock.hard_ns for clock in clocks]) - tick - tick[reference]
        prior[reference] = 0.0
        bits, occupied = _occupied(timeline)
        seen = occupied.any(axis=0)
        return cls(
            readers=readers,
            reference=reference,
            prior=prior,
            rate=np.array([clock.rate_error for clock in clocks]),
            tick=tick,
            window_bits=bits,
            occupied=occupied[:, seen],
            knot=np.cumsum(seen) - 1,
            center=np.asarray(np.flatnonzero(seen) + 0.5, np.float64) * float(1 << bits),
        )

    def at_most(self, flows: _Proofs) -> Float64:
        """[k, n, n] edges of the graph: least upper bounds of d column minus d row at the middle of each window."""
        at_most = np.full((len(self.center), self.num_clocks, self.num_clocks), np.inf)
        knot = self.knot[flows.ended >> self.window_bits]
        center = self.center[knot]
        bound = flows.bound + self.rate[flows.destination] * np.abs(flows.ended - center)
        bound += self.rate[flows.source] * np.abs(flows.signalled - center)
        place = (knot * self.num_clocks + flows.source) * self.num_clocks + flows.destination
        np.minimum.at(at_most.reshape(-1), place, bound)
        # What holds in one window holds in another, but for what the two clocks may have drifted in between. Where a
        # rank has no events yet, or no more, keep d constant: no flow is there, and all edges hold for that d too.
        drift = self.center[:, None, None] * (self.rate[:, None] + self.rate[None, :])
        at_most = np.minimum(
            np.minimum.accumulate(at_most - drift, axis=0) + drift,
            np.minimum.accumulate((at_most + drift)[::-1], axis=0)[::-1] - drift,
        )
        at_most[:, self.reference, :] = np.minimum(at_most[:, self.reference, :], self.prior)
        at_most[:, :, self.reference] = np.minimum(at_most[:, :, self.reference], self.prior)
        at_most[:, range(self.num_clocks), range(self.num_clocks)] = 0.0
        return at_most

    def hard_ns(self, place: int, upper: Float64, lower: Float64) -> float:
        """The bound of a clock that holds in all windows in which its ranks have events; inf where flows say none."""
        seen = self.occupied[place]
        if place == self.reference or not seen.any():
            return float("inf")
        widest = float(np.maximum(upper[seen, place], -lower[seen, place]).max())
        ticks = self.tick[place] + self.tick[self.reference]
        return float(widest + self.rate[place] * self.half + ticks + _ROUNDING_NS)


def _tightened(rank: Rank, hard_ns: float) -> Rank:
    """The rank with that bound, if it is the narrower one."""
    clock = rank.clock
    if clock is None or hard_ns >= clock.hard_ns:
        return rank
    return dataclasses.replace(rank, clock=dataclasses.replace(clock, hard_ns=hard_ns, round_trip_ns=clock.hard_ns))


def _readers(timeline: Timeline) -> list[Rank]:
    return lowest_readers(timeline.ranks, clocks_of_ranks(timeline.ranks))


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


def _occupied(timeline: Timeline) -> tuple[int, Bools]:
    """(window_bits, [num_clocks, num_windows] whether a rank of the clock has a device event in the window)."""
    spans, marks = timeline.spans, timeline.marks
    on_device = spans.launch >= 0
    closed = on_device & (spans.end != OPEN_END)
    events = [
        (spans.track[on_device], spans.start[on_device]),
        (spans.track[closed], spans.end[closed]),
        (marks.track, marks.time),
    ]
    last = max(int(time.max(initial=0)) for _, time in events)
    bits, num_clocks = _MIN_WINDOW_BITS, len(_readers(timeline))
    while (last >> bits) + 1 > max(_MAX_BOUNDS // num_clocks**2, 1):
        bits += 1
    occupied = np.zeros((num_clocks, (last >> bits) + 1), np.bool_)
    row = _places(timeline)[timeline.track_ranks()] * occupied.shape[1]
    for track, time in events:
        occupied.reshape(-1)[row[track] + (time >> bits)] = True
    return bits, occupied


def _contradiction(rank: int, via: int, excess_ns: float) -> Problem:
    one, other = sorted((rank, via))
    text = (
        f"signals and waits of ranks {one} and {other} contradict what the clocks allow by {duration(excess_ns)}: a "
        "wait ended before its signal began, or a clock was set; hard_ns is that of the round trips"
    )
    return Problem("error", "contradicting_flows", one, -1, text)


def _outside(timeline: Timeline, graph: _Graph, place: int, upper: Float64, lower: Float64) -> Problem | None:
    """The fit of a clock where the flows prove that it is off."""
    seen = graph.occupied[place]
    rank, reference = graph.readers[place], graph.readers[graph.reference]
    if rank.clock is None or not seen.any():
        return None
    beyond = np.maximum(lower[seen, place], -upper[seen, place]).max()
    # Noise of the samples and drift over the events explain this much.
    if beyond <= _LIKELY_SIGMAS * rank.clock.sigma_ns + graph.rate[place] * np.ptp(graph.center[seen]):
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
