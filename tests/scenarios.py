"""Synthetic runs with known causes: programs of warps in true time, turned into the Timeline that a capture would give.

    run = Scenario(num_ranks=3)
    run.launch("dispatch")
    for rank in range(3):
        run.work(rank, 1000 + (5000 if rank == 1 else 0))  # rank 1 is late
        run.signal(rank, peer=(rank + 1) % 3)
    for rank in range(3):
        run.wait(rank, peer=(rank - 1) % 3)
    timeline = run.timeline(clock_error={2: 700}, hard_ns=1000)

Every warp has a time of its own, `run.now[rank, warp]`, which each call moves on. A signal must be called before the
wait that it releases. Times are true ns; `clock_error` is added to the stamps of a rank only when the Timeline is made.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.model import (
    OPEN_END,
    Channel,
    ChannelKind,
    ClockFit,
    EventClass,
    EventType,
    Field,
    Int64,
    Launch,
    Rank,
    Spans,
    Timeline,
    Track,
    TrackKind,
)

SIGNAL_NS = 40
"""A signal whose stores have drained already."""
SEE_NS = 20
"""From the flag's store until a waiting warp has seen it; also the length of a wait that finds its flag raised."""

_PEER, _SLOT = Field("peer", 10), Field("slot", 22)
_TOKEN = Channel("token", ChannelKind.DATA, ("slot",))
_ROOM = Channel("room", ChannelKind.CREDIT, ())
_MEETING = Channel("meeting", ChannelKind.BARRIER, ("round",))


def _event(name: str, kind: EventClass, channel: Channel | None = None, *fields: Field) -> EventType:
    return EventType(name, kind, "completion", channel, fields)


EVENTS = (
    _event("copy_token", EventClass.WORK),
    _event("receive_token", EventClass.WORK),
    _event("signal_token", EventClass.SIGNAL, _TOKEN, _PEER, _SLOT),
    _event("wait_token", EventClass.WAIT, _TOKEN, _PEER, _SLOT),
    _event("signal_room", EventClass.SIGNAL, _ROOM, _PEER, Field("value", 32)),
    _event("wait_room", EventClass.WAIT, _ROOM, _PEER, Field("wanted", 32)),
    _event("signal_meeting", EventClass.SIGNAL, _MEETING, _PEER, Field("round", 16)),
    _event("wait_meeting", EventClass.WAIT, _MEETING, Field("round", 16)),
    _event("wait_block", EventClass.WAIT),
    _event("wait_grid", EventClass.WAIT),
    _event("wait_other", EventClass.WAIT),
    EventType("dispatch", EventClass.LAUNCH, "completion"),
)
NUMBER = {event.name: idx for idx, event in enumerate(EVENTS)}


class Scenario:
    """A run of `num_ranks` ranks with one block of `num_warps` warps each."""

    def __init__(self, num_ranks: int, num_warps: int = 1, nodes: Iterable[str] | None = None) -> None:
        self.ranks, self.warps = range(num_ranks), range(num_warps)
        self.nodes = list(nodes or ["node-a"] * num_ranks)
        self.now = {(rank, warp): 1000 for rank in self.ranks for warp in self.warps}
        self._launches: list[Launch] = []
        self._rows: list[tuple[int, int, int, int, int, int]] = []  # track, event, launch, start, end, payload
        self._arrived: dict[tuple[object, ...], int] = {}
        self._counts: dict[str, int] = {}

    def launch(self, name: str, at: int | None = None, late: Mapping[int, int] | None = None) -> None:
        """Starts a kernel on all ranks: at a true time, or when the warps of a rank are through; `late` ns by rank."""
        sequence = self._counts[name] = self._counts.get(name, -1) + 1
        epoch = 1 + len(self._launches) // len(self.ranks)
        self._rows += self._launch_rows()
        for rank in self.ranks:
            num = len(self.warps)
            self._launches.append(Launch(rank, epoch - 1, name, sequence, 0, epoch, 1, num, num, 64, 0, 64))
            start = max(self.now[rank, warp] for warp in self.warps) if at is None else at
            for warp in self.warps:
                assert start >= self.now[rank, warp], "the last launch takes longer than that"
                self.now[rank, warp] = start + (late or {}).get(rank, 0)
        self._started = dict(self.now)

    def work(self, rank: int, ns: int, warp: int = 0, event: str = "copy_token") -> None:
        self._span(rank, warp, event, self.now[rank, warp], ns)

    def pause(self, rank: int, ns: int, warp: int = 0) -> None:
        """Time in which nothing is on record."""
        self.now[rank, warp] += ns

    def signal(self, rank: int, peer: int, slot: int = 0, ns: int = SIGNAL_NS, warp: int = 0) -> None:
        """A token's flag. `ns` more than SIGNAL_NS: its stores take longer to drain."""
        self._span(rank, warp, "signal_token", self.now[rank, warp], ns, peer=peer, slot=slot)
        self._arrived["token", self._epoch(), rank, peer, slot] = self.now[rank, warp]

    def wait(self, rank: int, peer: int, slot: int = 0, warp: int = 0, see_ns: int = SEE_NS) -> None:
        arrived = self._arrived["token", self._epoch(), peer, rank, slot]
        self._wait(rank, warp, "wait_token", arrived, see_ns, peer=peer, slot=slot)

    def grant(self, rank: int, peer: int, value: int, ns: int = SIGNAL_NS, warp: int = 0) -> None:
        """The consumer `rank` lets `peer` send up to `value`."""
        self._span(rank, warp, "signal_room", self.now[rank, warp], ns, peer=peer, value=value)
        self._arrived["room", self._epoch(), rank, peer, value] = self.now[rank, warp]

    def wait_room(self, rank: int, peer: int, wanted: int, warp: int = 0) -> None:
        """Until `peer` has granted `wanted` or more."""
        granted = [
            at
            for (what, epoch, source, destination, value), at in self._arrived.items()
            if (what, epoch, source, destination) == ("room", self._epoch(), peer, rank) and value >= wanted
        ]
        self._wait(rank, warp, "wait_room", min(granted), SEE_NS, peer=peer, wanted=wanted)

    def meet(self, ns: int = SIGNAL_NS, warp: int = 0, num_tellers: int = 1) -> None:
        """A barrier of all ranks: `num_tellers` warps of each, from `warp` on, tell every rank; the first one waits."""
        number = self._counts["meeting"] = self._counts.get("meeting", -1) + 1
        last = dict.fromkeys(self.ranks, 0)
        for rank in self.ranks:
            for teller, distance in itertools.product(range(warp, warp + num_tellers), self.ranks):
                peer = (rank + distance) % len(self.ranks)
                self._span(rank, teller, "signal_meeting", self.now[rank, teller], ns, peer=peer, round=number)
                last[peer] = max(last[peer], self.now[rank, teller])
        for rank in self.ranks:
            self._wait(rank, warp, "wait_meeting", last[rank], SEE_NS, round=number)

    def meet_block(self, rank: int) -> None:
        """A barrier of the warps of a block."""
        last = max(self.now[rank, warp] for warp in self.warps)
        for warp in self.warps:
            self._wait(rank, warp, "wait_block", last, SEE_NS)

    def wait_other(self, rank: int, ns: int, warp: int = 0) -> None:
        """For something that has no channel."""
        self._span(rank, warp, "wait_other", self.now[rank, warp], ns)

    def timeline(
        self,
        clock_error: Mapping[int, int] | None = None,
        hard_ns: float = 0.0,
        sigma_ns: float = 0.0,
        without: Iterable[str] = (),
    ) -> Timeline:
        """What a capture of the run would give, with stamps that are wrong by `clock_error` ns, rank by rank.

        hard_ns and sigma_ns go for every rank but 0, the reference. `without`: events that were not recorded.
        """
        rows = sorted([*self._rows, *self._launch_rows()], key=lambda row: (row[0], row[3], -row[4]))
        lost = {NUMBER[name] for name in without}
        columns = np.array([row for row in rows if row[1] not in lost] or np.empty((0, 6)), np.int64).T
        track, event, launch, start, end, payload = columns
        tracks = self._tracks()
        wrong = np.array([(clock_error or {}).get(entry.rank, 0) for entry in tracks], np.int64)[track]
        timeline = Timeline(
            unit="ns",
            ranks=tuple(self._rank(rank, hard_ns, sigma_ns) for rank in self.ranks),
            tracks=tracks,
            events=EVENTS,
            launches=tuple(self._launches),
            spans=Spans(
                track.astype(np.int32),
                event.astype(np.int32),
                launch.astype(np.int32),
                start + wrong,
                end + wrong,
                payload.astype(np.uint64),
                np.zeros(len(start), np.uint64),
            ),
            title="synthetic",
        )
        flows, problems = join_flows(timeline)
        return timeline.replace(flows=flows, problems=problems)

    def _rank(self, rank: int, hard_ns: float, sigma_ns: float) -> Rank:
        clock = ClockFit("ping-pong", hard_ns, sigma_ns) if rank else ClockFit("reference", 0.0, 0.0)
        return Rank(rank, self.nodes[rank], "synthetic", "cuda", "closed", 1e9, 1, clock)

    def _tracks(self) -> tuple[Track, ...]:
        device = [
            Track(rank, TrackKind.DEVICE, f"block 0 warp {warp}", block=0, warp=warp, sm=0, role="send")
            for rank in self.ranks
            for warp in self.warps
        ]
        return (*device, *(Track(rank, TrackKind.LAUNCH, "kernels") for rank in self.ranks))

    def _launch_rows(self) -> list[tuple[int, int, int, int, int, int]]:
        """The launch spans of the kernel under way."""
        if not self._launches:
            return []
        first_track, first_launch = len(self.now), len(self._launches) - len(self.ranks)
        rows = []
        for rank in self.ranks:
            start = min(self._started[rank, warp] for warp in self.warps)
            end = max(self.now[rank, warp] for warp in self.warps)
            rows.append((first_track + rank, NUMBER["dispatch"], first_launch + rank, start, end, 0))
        return rows

    def _epoch(self) -> int:
        return self._launches[-1].epoch

    def _wait(self, rank: int, warp: int, event: str, arrived: int, see_ns: int, **fields: int) -> None:
        begin = self.now[rank, warp]
        self._span(rank, warp, event, begin, max(arrived - begin, 0) + see_ns, **fields)

    def _span(self, rank: int, warp: int, event: str, start: int, ns: int, **fields: int) -> None:
        payload, shift = 0, 0
        for field in EVENTS[NUMBER[event]].begin_fields:
            payload |= fields[field.name] << shift
            shift += field.bits
        launch = len(self._launches) - len(self.ranks) + rank
        track = rank * len(self.warps) + warp
        self._rows.append((track, NUMBER[event], launch, start, start + ns, payload))
        self.now[rank, warp] = start + ns


PERIOD_NS = 1_000_000
"""A launch of `exchange` every so often: what is late in one does not spread to the next."""


def exchange(
    num_ranks: int = 4,
    num_launches: int = 5,
    late: Mapping[int, int] | None = None,
    slow_link: Mapping[tuple[int, int], int] | None = None,
    tokens: Mapping[int, int] | None = None,
    nodes: Iterable[str] | None = None,
) -> Scenario:
    """Every rank sends every other one a token and waits for theirs, a warp a peer, and then works on what came.

    late: ns by which a rank comes late to sending. slow_link: (source, destination) -> ns that its stores take to
    drain. tokens: ns that a rank works longer on what it received.
    """
    run = Scenario(num_ranks, num_warps=num_ranks - 1, nodes=nodes)
    for number in range(num_launches):
        run.launch("dispatch", at=(1 + number) * PERIOD_NS)
        for rank in run.ranks:
            for warp in run.warps:
                peer = (rank + 1 + warp) % num_ranks
                run.work(rank, 2000 + (late or {}).get(rank, 0), warp)
                run.signal(rank, peer, ns=SIGNAL_NS + (slow_link or {}).get((rank, peer), 0), warp=warp)
        for rank in run.ranks:
            for warp in run.warps:
                run.wait(rank, (rank + 1 + warp) % num_ranks, warp=warp)
                run.work(rank, 500 + (tokens or {}).get(rank, 0), warp, "receive_token")
    return run


def rows_of(timeline: Timeline, event: str) -> Int64:
    """The spans of an event."""
    return np.flatnonzero(timeline.spans.event == NUMBER[event])


def with_clocks(timeline: Timeline, hard_ns: float, sigma_ns: float, error_ns: dict[int, int]) -> Timeline:
    """The same run seen through clocks that are wrong."""
    ranks = tuple(
        dataclasses.replace(
            rank, clock=ClockFit("ping-pong", hard_ns, sigma_ns) if rank.rank else ClockFit("reference", 0.0, 0.0)
        )
        for rank in timeline.ranks
    )
    spans = timeline.spans
    wrong = np.array([error_ns.get(track.rank, 0) for track in timeline.tracks], np.int64)[spans.track]
    end = np.where(spans.end == OPEN_END, OPEN_END, spans.end + wrong)
    return timeline.replace(ranks=ranks, spans=dataclasses.replace(spans, start=spans.start + wrong, end=end))
