"""Takes clock samples with the other ranks of a run: rounds of ping-pong between pairs, brackets of the host's clock.

Between ranks that read the same clock there is nothing to measure: the lowest rank of each clock plays for all of them.
One pair runs at a time. All other ranks sleep in a receive, because the pair may need the core that they would spin on.
Samples are appended pair by pair, so a rank that dies in mid-round leaves what it had. docs/clocks.md explains the use
of the samples. `CaptureClocks` decides when to take them: at both ends of a capture, and between launches every few
seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.comm.devices.device import CaptureDevice, DeviceClock, HeapPeers
from tracekern.comm.ranks.group import Group, message_timeout_s
from tracekern.comm.ranks.node import share_segments
from tracekern.dump import format as fmt
from tracekern.dump.format import CLOCK_SAMPLE, SampleKind
from tracekern.errors import PeerLost, one_line
from tracekern.host_clock import Anchor, anchor, host_ns
from tracekern.record.sampling_schedule import SamplingSchedule
from tracekern.segment.view import SegmentView
from tracekern.segment.writer import SegmentWriter

ALL_PAIRS_UP_TO = 8
MAX_ROUND_TRIPS = 1_000
"""Limit for one pair in one round over shared memory; takes 0.2 ms if both ranks run undisturbed."""
MAX_PAIR_NS = 20_000_000
"""A pair whose ranks are preempted again and again gives up after this time and keeps what it has."""
NUM_NETWORK_ROUND_TRIPS = 40
NUM_BRACKETS = 50
_KEPT_EACH_WAY = 12

Int64 = npt.NDArray[np.int64]
Append = Callable[[npt.NDArray[Any]], None]

_epochs = itertools.count(1)


def choose_pairs(clock_ids: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the (initiator, responder) pairs of a round, in order.

    Up to 8 clocks: all pairs. More clocks: a ring, and a star around the first.

    clock_ids: of all ranks (DeviceClock.id). The lowest rank of each clock takes part.
    """
    ranks = [rank for rank, clock in enumerate(clock_ids) if not clock or clock not in clock_ids[:rank]]
    count = len(ranks)
    if count <= ALL_PAIRS_UP_TO:
        pairs = list(itertools.combinations(range(count), 2))
    else:
        ring = [(place, (place + 1) % count) for place in range(count)]
        pairs = sorted({(min(pair), max(pair)) for pair in ring} | {(0, place) for place in range(1, count)})
    # The roles alternate; otherwise the first rank would keep most of the rows.
    return [(ranks[a], ranks[b]) if (a + b) % 2 else (ranks[b], ranks[a]) for a, b in pairs]


class ClockSampler:
    """Samples the clocks of all ranks of a group; every call is collective. Ranks are called as the run calls them.

    append: takes this rank's rows of a round, dtype CLOCK_SAMPLE. peers: pairs of these ranks that give the same peers
    exchange stamps in their heap, all other pairs over the group. Ranks that all read the same clock send each other
    nothing during a round.
    """

    def __init__(
        self,
        clock: DeviceClock,
        append: Append,
        group: Group,
        peers: HeapPeers | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._append = append
        self._peers = peers
        self._rank, ranks = group.world_rank, group.world_ranks
        heap_ranks = list(peers.ranks) if peers else []
        told = group.all_gather([clock.id, heap_ranks], "clock samples")
        pairs = choose_pairs([clock_id for clock_id, _ in told])
        self._pairs = [(ranks[initiator], ranks[responder]) for initiator, responder in pairs]
        self._in_heap = {rank for rank, (_, theirs) in zip(ranks, told, strict=True) if theirs == heap_ranks}
        self._in_heap &= {*heap_ranks}
        limit = timedelta(seconds=timeout_s or message_timeout_s())
        self._link = _Link(group.process_group, limit) if self._pairs else None
        self._next_round = 0

    def sample(self) -> None:
        """Takes one round of samples. Raises PeerLost if a rank does not take part in time."""
        round_idx, rank = self._next_round, self._rank
        self._next_round += 1
        ahead = anchor()  # ranks of one machine share host time, but for the doubt of their anchors
        host_time = np.array([ahead.ns - ahead.doubt_ns, 0, ahead.ns + ahead.doubt_ns])
        brackets = self._clock.read_brackets(NUM_BRACKETS) + host_time
        for kind, stamps in ((SampleKind.HOST_BRACKET, brackets), (SampleKind.WALL_CLOCK, _read_wall_clock())):
            self._append(_rows(kind, round_idx, rank, rank, stamps[:, [0, 1, 1, 2]]))
        if self._link is None:
            return
        try:
            self._link.barrier()
            self._sample_pairs(self._link, round_idx)
            # No rank resumes work, which may spin, before the last pair has finished.
            self._link.barrier()
        except Exception as error:  # noqa: BLE001 - also of a group that the program has destroyed
            reason = str(error).strip().split("\n")[0]
            raise PeerLost(f"clock samples: rank {rank} lost the others in round {round_idx} ({reason})") from None

    def _sample_pairs(self, link: _Link, round_idx: int) -> None:
        pairs = self._pairs
        for index, (initiator, responder) in enumerate(pairs):
            if self._rank == initiator:
                if index and pairs[index - 1][0] != initiator:
                    link.receive(pairs[index - 1][0])
                epoch = next(_epochs)
                link.send(responder, epoch)
                stamps = self._exchange(link, responder, True, epoch)
                self._append(_leading(_rows(SampleKind.PING_PONG, round_idx, initiator, responder, stamps)))
                if index + 1 < len(pairs) and pairs[index + 1][0] != initiator:
                    link.send(pairs[index + 1][0], index)
            elif self._rank == responder:
                self._exchange(link, initiator, False, link.receive(initiator))

    def _exchange(self, link: _Link, peer: int, initiates: bool, epoch: int) -> Int64:
        """Returns the stamps t0..t3 of the round trips with `peer`, [n, 4]; [0, 4] on the responder."""
        peers = self._peers
        if peers is None or not {self._rank, peer} <= self._in_heap:
            return _ask_over(link, peer, self._clock) if initiates else _answer_over(link, peer, self._clock)
        with _on_own_core(0 if initiates else 1):
            slot = peers.ranks.index(peer)
            stamps = peers.ping_pong(slot, initiates, epoch & 0xFFFFFFFF, MAX_ROUND_TRIPS, MAX_PAIR_NS)
        return stamps[:, [0, 1, 1, 2]]


class _Link:
    """Sends small messages between ranks; a receiver sleeps while it waits."""

    def __init__(self, group: Any, timeout: timedelta) -> None:
        """group: a gloo group of these ranks; NCCL would run messages on the device that is being measured."""
        import torch.distributed as dist

        self._dist = dist
        self._group = group
        self._timeout = timeout

    def send(self, peer: int, *words: int) -> None:
        import torch

        message = torch.tensor(words, dtype=torch.int64)
        self._finish(self._dist.isend(message, peer, group=self._group))

    def receive(self, peer: int) -> int:
        return self.receive_all(peer, 1)[0]

    def receive_all(self, peer: int, num_words: int) -> list[int]:
        import torch

        message = torch.empty(num_words, dtype=torch.int64)
        self._finish(self._dist.irecv(message, peer, group=self._group))
        return [int(word) for word in message]

    def _finish(self, work: Any) -> None:
        work.wait(self._timeout)

    def barrier(self) -> None:
        self._dist.monitored_barrier(self._group, timeout=self._timeout)


def _read_wall_clock() -> Int64:
    """Returns the wall clock between two readings of host time, [1, 3]."""
    found, now_ns = Anchor.read(), host_ns()
    return np.array([[now_ns - found.doubt_ns, now_ns + found.ns - anchor().ns, now_ns + found.doubt_ns]])


def _ask_over(link: _Link, peer: int, clock: DeviceClock) -> Int64:
    stamps = np.zeros((NUM_NETWORK_ROUND_TRIPS, 4), np.int64)
    for row in stamps:
        row[0] = clock.read_ticks()
        link.send(peer, 0)
        row[1:3] = link.receive_all(peer, 2)
        row[3] = clock.read_ticks()
    return stamps


def _answer_over(link: _Link, peer: int, clock: DeviceClock) -> Int64:
    for _ in range(NUM_NETWORK_ROUND_TRIPS):
        link.receive(peer)
        received_ticks = clock.read_ticks()
        link.send(peer, received_ticks, clock.read_ticks())
    return np.zeros((0, 4), np.int64)


def _rows(kind: SampleKind, round_idx: int, initiator: int, responder: int, stamps: Int64) -> npt.NDArray[Any]:
    rows = np.zeros(len(stamps), CLOCK_SAMPLE)
    rows["kind"], rows["round_idx"], rows["initiator"], rows["responder"] = kind, round_idx, initiator, responder
    for column in range(4):
        rows[f"t{column}"] = stamps[:, column]
    return rows


def _leading(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Selects the round trips with the tightest bounds: fastest there, fastest back, and fastest in total.

    The other rows would only enlarge the dump.
    """
    there, back = rows["t1"] - rows["t0"], rows["t3"] - rows["t2"]
    ranked = [np.argsort(way, kind="stable")[:_KEPT_EACH_WAY] for way in (there, back, there + back)]
    return rows[np.unique(np.concatenate(ranked))]


@contextlib.contextmanager
def _on_own_core(which: int) -> Iterator[None]:
    """Pins this thread to the core with index `which` of its set, and restores the set afterwards.

    Two ranks that spin on one core would each wait for the other's time slice.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield
        return
    os.sched_setaffinity(0, {cores[which]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, set(cores))


SAMPLE_EVERY_S = 3.0
"""Interval after which clocks are sampled, before the next launch. The uncertainty between two rounds grows with the
square of the interval: with 3 s a host lane stays within 3 us (docs/clocks.md), even if a launch comes late."""

_log = logging.getLogger("tracekern")


class CaptureClocks:
    """Samples the clocks of one capture. Opening and sampling are collective."""

    def __init__(self, where: str) -> None:
        """where: names the capture in messages. Nothing is sampled before open()."""
        self._where = where
        self._sampler: ClockSampler | None = None
        self._schedule: SamplingSchedule | None = None

    def open(self, device: CaptureDevice, segment: SegmentWriter, group: Group, run_id: str) -> None:
        """Takes the first samples. A rank that cannot exchange messages is placed beside its host alone."""
        if not group.is_connected:
            group = Group(group.rank, 1)
        elif share_segments(group):
            with group.in_step():
                self._schedule = self._schedule_of(segment, run_id, group)
                self._schedule.postpone(SAMPLE_EVERY_S)  # before others come to their first launch
        # All ranks meet here, so that none removes its segment before the others have it.
        self._sampler = ClockSampler(device.clock, segment.append_clock_samples, group, device.peers)
        self.sample()

    @staticmethod
    def _schedule_of(segment: SegmentWriter, run_id: str, group: Group) -> SamplingSchedule:
        names = [fmt.segment_name(run_id, rank) for rank in group.world_ranks]
        segments: list[SegmentView] = [segment if name == segment.name else SegmentView.attach(name) for name in names]
        for peer in segments:
            if peer is not segment:
                peer.close()  # stays mapped; an open descriptor would keep a removed file alive
        return SamplingSchedule(group.rank, segments)

    def sample(self) -> None:
        """Takes one round of samples now."""
        if self._sampler is not None:
            if self._schedule is not None:
                self._schedule.postpone(SAMPLE_EVERY_S)
            self._sampler.sample()

    def shorten(self, table: Any) -> None:
        """Lets the LaunchTable see when samples are due: then launches come to before_launch()."""
        if self._sampler is not None and self._schedule is not None:
            table.sample_by(*self._schedule.words, self._schedule.counts)

    def before_launch(self) -> None:
        """Takes samples if they are due and all ranks agree on this launch."""
        if self._sampler is not None and self._schedule is not None and self._schedule.before_launch():
            self._sample_or_tell(logging.WARNING)

    def close(self, in_order: bool, limit_s: float) -> bool:
        """Takes the last samples if all ranks close their capture in order. Returns whether they do.

        limit_s: how long to wait for the others on this host.
        """
        if self._schedule is not None:
            in_order = self._schedule.leave(in_order, limit_s)
            self._schedule = None
        return in_order and self._sample_or_tell(logging.INFO)  # a peer that is lost is told of when the dumps are

    def _sample_or_tell(self, level: int) -> bool:
        """Takes samples, or logs why not: the workload reports a dead peer; the capture goes on with what it has."""
        try:
            self.sample()
        except Exception as error:  # noqa: BLE001 - also of a clock that cannot be read
            _log.log(level, "capture %s: no more clock samples: %s", self._where, one_line(error))
            self._sampler = None
            return False
        return True
