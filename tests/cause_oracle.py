"""The analysis of causes once more, nanosecond by nanosecond in plain Python, from the words of docs/analysis.md alone.

And any programs to try it on: ranks of one warp each that work, send, wait, make room and meet in any order.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scenarios import SIGNAL_NS, Scenario

from tracekern.analysis.causes.blame import Target
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.analysis.waits.pieces import is_message
from tracekern.timeline.model import EventClass, Timeline, TrackKind, field_values

Category = str | tuple[str, str]
"""A phase, or one of those that belong to no kernel's code."""
_NO_PHASE = ("", "")
Key = tuple[int, Target, tuple[str, str], int]
"""Rank, target, phase, peer."""


@dataclass(frozen=True)
class _Edge:
    """A wait of which the signal is on record."""

    waiter: int
    source: int
    """Ranks."""
    waiter_launch: int
    source_launch: int
    begin: int
    release: int
    end: int
    is_message: bool
    meeting: tuple[int, int] | None
    """Epoch and round of a barrier of ranks."""

    @property
    def late_ns(self) -> int:
        return self.release - self.begin

    @property
    def link_ns(self) -> int:
        return self.end - self.release if self.is_message else 0

    @property
    def launches(self) -> set[int]:
        return {self.waiter_launch, self.source_launch}


@dataclass(frozen=True)
class _Piece:
    """A span, without its lateness and link."""

    phase: tuple[str, str]
    first: int
    stop: int
    peer: int
    """Of a signal."""


@dataclass
class _Program:
    edges: list[_Edge]
    start: list[int]
    """Of each launch."""
    spent: list[list[Category]]
    """By rank and ns."""
    pieces: list[list[_Piece]]
    """By rank."""
    typical: dict[tuple[int, Category], float]


def oracle(timeline: Timeline, waits: Waits) -> dict[Key, tuple[float, float]]:
    """(direct ns, ns passed on) of every cause of a program of any_program()."""
    edges, pieces = _edges(timeline, waits), _pieces(timeline, waits)
    start = _launch_times(timeline)[0]
    run = _Program(edges, start, _categories(timeline, edges), pieces, _typical(pieces))
    sums: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    late = sorted((edge for edge in edges if edge.late_ns), key=lambda edge: -edge.release)
    weight = dict.fromkeys(late, 1.0)
    for edge in late:
        since = _last_ordered(edge, edges, start)
        rest = edge.late_ns
        for rank, until, sign in ((edge.source, edge.release, 1), (edge.waiter, edge.begin, -1)):
            of_rank = [e for e in late if e.waiter == rank and since < e.release <= min(until, edge.release - 1)]
            waited = run.spent[rank][since:until].count("late")
            for other in of_rank:
                weight[other] += sign * weight[edge] * waited / sum(e.late_ns for e in of_rank)
            rest -= sign * waited if of_rank else 0
        for charges in (_excess(run, edge, since), _links(run, edge, since)):
            for side, key, ns in charges:
                is_passed = side == edge.waiter or (key[1] is Target.LINK and key[2] == _NO_PHASE)
                sums[key][0] += 0 if is_passed else ns
                sums[key][1] += weight[edge] * ns
                rest -= ns
        sums[edge.source, Target.UNEXPLAINED, _NO_PHASE, -1][0] += rest
        sums[edge.source, Target.UNEXPLAINED, _NO_PHASE, -1][1] += weight[edge] * rest
    for edge in edges:
        for place in range(2):
            sums[edge.source, Target.LINK, _NO_PHASE, edge.waiter][place] += edge.link_ns
    return _net(sums, sum(edge.late_ns + edge.link_ns for edge in edges))


def _excess(run: _Program, edge: _Edge, since: int) -> Iterator[tuple[int, Key, float]]:
    """What took longer than usual at the source, and what did at the waiter, below zero."""
    sides = [(edge.source, edge.release, 1), (edge.waiter, edge.begin, -1)]
    spent = [Counter(run.spent[rank][since:until]) for rank, until, _ in sides]
    for category in (set(spent[0]) | set(spent[1])) - {"late", "link"}:
        usual = min(spent[0][category], spent[1][category])
        if typical := run.typical.get((edge.waiter, category)):
            counts = [_count(run.pieces[rank], category, since, until) for rank, until, _ in sides]
            usual = math.floor(min(counts) * typical + 0.5 + 1e-6)
        for (rank, until, sign), of in zip(sides, spent, strict=True):
            ns = of[category] - usual
            if not ns:
                continue
            sent = [p for p in run.pieces[rank] if p.phase == category and p.peer >= 0 and since < p.stop <= until]
            for piece in sent:
                share = (sum(p.stop - p.first for p in sent) - ns) / len(sent)
                yield rank, (rank, Target.LINK, category, piece.peer), sign * (piece.stop - piece.first - share)
            if not sent:
                phase = _NO_PHASE if isinstance(category, str) else category
                yield rank, (rank, _target(category), phase, -1), sign * ns


def _count(pieces: list[_Piece], phase: Category, since: int, until: int) -> float:
    """How many pieces of the phase lie between, those that lie there in part by that part."""
    parts = ((min(p.stop, until) - max(p.first, since), p.stop - p.first) for p in pieces if p.phase == phase)
    return sum(max(inside, 0) / whole for inside, whole in parts)


def _links(run: _Program, edge: _Edge, since: int) -> Iterator[tuple[int, Key, float]]:
    """The link in the waits of the source, and in those of the waiter, below zero."""
    for rank, until, sign in ((edge.source, edge.release, 1), (edge.waiter, edge.begin, -1)):
        of_rank = [e for e in run.edges if e.waiter == rank and e.link_ns and since < e.end <= until]
        waited = run.spent[rank][since:until].count("link")
        for other in of_rank:
            share = other.link_ns / sum(e.link_ns for e in of_rank)
            yield rank, (other.source, Target.LINK, _NO_PHASE, other.waiter), sign * waited * share


def _net(sums: dict[Key, list[float]], charged: int) -> dict[Key, tuple[float, float]]:
    """Charges below zero go off the others of their kind, links first off those into the same rank, then off all."""
    left = {key: total for key, (_, total) in sums.items()}
    for of_link in (lambda key: (Target.LINK, key[3]), lambda key: Target.LINK):
        kinds: dict[object, list[Key]] = defaultdict(list)
        for key in sums:
            kinds[of_link(key) if key[1] is Target.LINK else key[1:3]].append(key)
        for keys in kinds.values():
            above, below = (sum(max(sign * left[key], 0) for key in keys) for sign in (1, -1))
            for key in keys:
                side = above if left[key] > 0 else below
                left[key] *= max(side - (above + below - side), 0) / max(side, 1e-9)
    kept = {key: left[key] / total for key, (_, total) in sums.items() if total > 0}
    scale = charged / max(sum(sums[key][1] * part for key, part in kept.items()), 1e-9)
    found = {}
    for key, part in kept.items():
        direct, total = (ns * part * scale for ns in sums[key])
        if total > 1e-6:
            direct = min(max(direct, 0), total)
            found[key] = direct, total - direct
    return found


def _target(category: Category) -> Target:
    if isinstance(category, str):
        return Target(category)
    return Target.LINK if category[1].startswith("signal_") or category[1] == "wait_meeting" else Target.WORK


def _pieces(timeline: Timeline, waits: Waits) -> list[list[_Piece]]:
    spans = timeline.spans
    foreign = waits.late_ns + np.where(is_message(waits), waits.wait_ns - waits.late_ns, 0)
    own = dict(zip(waits.row.tolist(), foreign.tolist(), strict=True))
    pieces: list[list[_Piece]] = [[] for _ in timeline.ranks]
    for row in range(len(spans)):
        track, event = timeline.tracks[spans.track[row]], timeline.events[spans.event[row]]
        first, stop = int(spans.start[row]) + own.get(row, 0), int(spans.end[row])
        if track.kind is TrackKind.DEVICE and stop > first:
            is_signal = event.event_class is EventClass.SIGNAL
            peer = int(field_values(event, "peer", spans, np.array([row]))[0]) if is_signal else -1
            pieces[track.rank].append(
                _Piece((timeline.launches[spans.launch[row]].name, event.name), first, stop, peer)
            )
    return pieces


def _typical(pieces: list[list[_Piece]]) -> dict[tuple[int, Category], float]:
    """By rank and phase its mean, or the median of all ranks' means, of two the lower, if that is less."""
    means: dict[Category, dict[int, float]] = defaultdict(dict)
    for rank, of_rank in enumerate(pieces):
        for phase in {piece.phase for piece in of_rank}:
            lengths = [piece.stop - piece.first for piece in of_rank if piece.phase == phase]
            means[phase][rank] = sum(lengths) / len(lengths)
    return {
        (rank, phase): min(mean, sorted(of.values())[(len(of) - 1) // 2])
        for phase, of in means.items()
        for rank, mean in of.items()
    }


def _edges(timeline: Timeline, waits: Waits) -> list[_Edge]:
    spans, rank_of = timeline.spans, timeline.track_ranks().tolist()
    edges = []
    columns = waits.row, waits.signal, waits.kind, waits.late_ns
    for row, signal, kind, late in zip(*(column.tolist() for column in columns), strict=True):
        waiter, source = rank_of[spans.track[row]], rank_of[spans.track[signal]]
        if signal >= 0 and waiter != source:
            launches = int(spans.launch[row]), int(spans.launch[signal])
            begin, end = int(spans.start[row]), int(spans.end[row])
            is_message, number = kind != WaitKind.BARRIER, int(spans.begin_payload[row])
            meeting = None if is_message else (timeline.launches[launches[0]].epoch, number)
            edges.append(_Edge(waiter, source, *launches, begin, begin + late, end, is_message, meeting))
    return edges


def _launch_times(timeline: Timeline) -> tuple[list[int], list[int]]:
    spans = timeline.spans
    rows = [spans.launch == launch for launch in range(len(timeline.launches))]
    return [int(spans.start[of].min()) for of in rows], [int(spans.end[of].max()) for of in rows]


def _categories(timeline: Timeline, edges: Iterable[_Edge]) -> list[list[Category]]:
    """By rank and ns: what the time was spent with."""
    spans, (start, end) = timeline.spans, _launch_times(timeline)
    spent: list[list[Category]] = [["gap"] * max(end) for _ in timeline.ranks]
    for number, launch in enumerate(timeline.launches):
        of_run = [
            int(spans.start[row])
            for row in np.flatnonzero(spans.launch == number).tolist()
            if timeline.tracks[spans.track[row]].kind is TrackKind.DEVICE
        ]
        first = min(of_run, default=start[number])
        for name, begin, stop in (("not started", start[number], first), ("between spans", first, end[number])):
            spent[launch.rank][begin:stop] = [(launch.name, f"({name})")] * (stop - begin)
    for row in range(len(spans)):
        track, first, stop = timeline.tracks[spans.track[row]], int(spans.start[row]), int(spans.end[row])
        if track.kind is TrackKind.DEVICE:
            phase = timeline.launches[spans.launch[row]].name, timeline.events[spans.event[row]].name
            spent[track.rank][first:stop] = [phase] * (stop - first)
    for edge in edges:
        spent[edge.waiter][edge.begin : edge.release] = ["late"] * edge.late_ns
        if edge.is_message:
            spent[edge.waiter][edge.release : edge.end] = ["link"] * edge.link_ns
    return spent


def _last_ordered(wait: _Edge, edges: list[_Edge], start: list[int]) -> int:
    """docs/analysis.md, "the last event that ordered the two"; 5 is for ranks of several warps."""
    known = [min(start)]
    known += [e.release for e in edges if e.launches == wait.launches and e.late_ns and e.release <= wait.begin]
    began = min(start[wait.waiter_launch], start[wait.source_launch])
    for launches in {frozenset(e.launches) for e in edges if {e.waiter, e.source} == {wait.waiter, wait.source}}:
        for waiter in launches:
            between = [e for e in edges if e.launches == launches and e.waiter_launch == waiter]
            if between and max(e.end for e in between) <= began:
                known += [e.release for e in between if e.late_ns]
    passed = [e for e in edges if e.waiter == wait.waiter and e.meeting and e.end <= wait.begin]
    if passed:
        last = max(passed, key=lambda e: e.end)
        others = [
            e for e in edges if e.waiter == wait.source and e.meeting == last.meeting and e.release < wait.release
        ]
        known += [max(last.release, e.release) for e in others if max(last.release, e.release) <= wait.begin]
    for listener, own, speaker, until in (
        (wait.waiter, wait.waiter_launch, wait.source_launch, wait.begin),
        (wait.source, wait.source_launch, wait.waiter_launch, wait.release),
    ):
        heard = [e for e in edges if e.waiter == listener and e.source_launch == speaker]
        if any(e.end <= (until if e.waiter_launch == own else start[own]) for e in heard):
            known.append(start[speaker])
    return min(max(known), wait.begin)


def any_program(seed: int) -> Scenario:
    """One to four launches of two kernels on two to four ranks of one warp each."""
    rng = random.Random(seed)
    run, slot = Scenario(rng.randint(2, 4)), 0
    for number in range(rng.randint(1, 4)):
        run.launch(f"kernel_{number % 2}", late={rank: rng.choice([0, 0, rng.randint(1, 200)]) for rank in run.ranks})
        sent: list[tuple[int, int, int]] = []
        for _ in range(rng.randint(1, 8)):
            rank, peer = rng.sample(run.ranks, 2)
            slot += 1
            match rng.choice(["work", "pause", "meet", "room", "send", "send", "receive", "receive"]):
                case "work":
                    run.work(rank, rng.randint(1, 300), event=rng.choice(["copy_token", "receive_token"]))
                case "pause":
                    run.pause(rank, rng.randint(1, 60))
                case "meet" if rng.random() < 0.4:
                    run.meet()
                case "room":
                    run.grant(rank, peer, slot)
                    run.wait_room(peer, rank, slot)
                case "send":
                    run.signal(rank, peer, slot, ns=rng.choice([SIGNAL_NS, rng.randint(SIGNAL_NS, 150)]))
                    sent.append((peer, rank, slot))
                case "receive" if sent:
                    run.wait(*sent.pop(rng.randrange(len(sent))))
        for message in sent:
            run.wait(*message)
    return run
