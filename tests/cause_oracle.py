"""The analysis of causes once more, nanosecond by nanosecond in plain Python, from the words of docs/analysis.md alone.

And any programs to try it on: ranks of one warp each that work, send, wait, make room and meet in any order.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scenarios import SIGNAL_NS, Scenario

from tracekern.analysis.causes.analyze import Target
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.timeline.model import Timeline, TrackKind

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

    @property
    def late_ns(self) -> int:
        return self.release - self.begin

    @property
    def link_ns(self) -> int:
        return self.end - self.release if self.is_message else 0

    @property
    def launches(self) -> set[int]:
        return {self.waiter_launch, self.source_launch}


def oracle(timeline: Timeline, waits: Waits) -> dict[Key, tuple[float, float]]:
    """(direct ns, ns passed on) of every cause of a program of any_program()."""
    edges, start = _edges(timeline, waits), _launch_times(timeline)[0]
    spent = _categories(timeline, edges)
    late = sorted((edge for edge in edges if edge.late_ns), key=lambda edge: -edge.release)
    cost = {edge: float(edge.late_ns) for edge in late}
    found: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for edge in late:
        since = _last_ordered(edge, edges, start)
        of_source = Counter(spent[edge.source][since : edge.release])
        of_waiter = Counter(spent[edge.waiter][since : edge.begin])
        own = {e: e.late_ns for e in late if e.waiter == edge.source and since < e.release < edge.release}
        link = {e: e.link_ns for e in edges if e.waiter == edge.source and since < e.end < edge.release}
        of_source["late"], of_source["link"] = sum(own.values()), sum(link.values())
        longer = of_source - of_waiter
        for category, ns in longer.items() or [("unexplained", 1)]:
            share = ns / max(longer.total(), 1)
            direct, passed = edge.late_ns * share, (cost[edge] - edge.late_ns) * share
            if category == "late":
                for other in own:
                    cost[other] += (direct + passed) * own[other] / of_source["late"]
            elif category == "link":
                for other in link:
                    key = (other.source, Target.LINK, _NO_PHASE, other.waiter)
                    found[key][1] += (direct + passed) * link[other] / of_source["link"]
            else:
                entry = found[edge.source, _target(category), _NO_PHASE if isinstance(category, str) else category, -1]
                entry[0] += direct
                entry[1] += passed
    for edge in edges:
        found[edge.source, Target.LINK, _NO_PHASE, edge.waiter][0] += edge.link_ns
    return {key: (direct, passed) for key, (direct, passed) in found.items() if direct + passed > 0}


def _target(category: Category) -> Target:
    if isinstance(category, str):
        return Target(category)
    return Target.LINK if category[1].startswith("signal_") else Target.WORK


def _edges(timeline: Timeline, waits: Waits) -> list[_Edge]:
    spans, rank_of = timeline.spans, timeline.track_ranks().tolist()
    edges = []
    columns = waits.row, waits.signal, waits.kind, waits.late_ns
    for row, signal, kind, late in zip(*(column.tolist() for column in columns), strict=True):
        waiter, source = rank_of[spans.track[row]], rank_of[spans.track[signal]]
        if signal >= 0 and waiter != source:
            launches = int(spans.launch[row]), int(spans.launch[signal])
            begin, end = int(spans.start[row]), int(spans.end[row])
            edges.append(_Edge(waiter, source, *launches, begin, begin + late, end, kind != WaitKind.BARRIER))
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
    """docs/analysis.md, "the last event that ordered the two"; 4 is for ranks of several warps."""
    known = [min(start)]
    known += [e.end for e in edges if e.launches == wait.launches and e.late_ns and e.end <= wait.begin]
    began = min(start[wait.waiter_launch], start[wait.source_launch])
    for launches in {frozenset(e.launches) for e in edges if {e.waiter, e.source} == {wait.waiter, wait.source}}:
        for waiter in launches:
            ends = [e.end for e in edges if e.launches == launches and e.waiter_launch == waiter]
            known += [max(ends)] if ends and max(ends) <= began else []
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
