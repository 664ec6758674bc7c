"""The calls of benchmarks/moe.py as walks of fluid.py: who sends what to whom, in which order, and what is local.

Warps take the rows of a walk in its order, as many at a time as there are warps: a wave. So an order matters only as
far as it puts rows of one peer into waves of their own; where a kernel or a partition has no more rows than warps, all
are on their way at once. Walks over mixed rows are one for all warps of a side. Those source by source are cut between
groups of neighbouring warps, each of which goes on by itself (Orders.groups).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from fluid import Part, Walk

from tracekern.moe.calls.wire import count_rows

VARIANTS = ("flag", "token", "fused", "balanced", "dedup", "reduce", "pipelined")

Order = Callable[[list[int], int], tuple[np.ndarray, np.ndarray]]
"""(rows of each source, own rank) -> the sources in the order in which their rows are visited, and which row it is."""


def by_source(counts: list[int], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows of rank 0, then those of 1: the same on every rank."""
    del rank
    return np.repeat(np.arange(len(counts)), counts), np.concatenate([np.arange(count) for count in counts])


def in_turns(counts: list[int], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A row of each source in turn, from the one behind the own rank on."""
    sources, rows = by_source(counts, rank)
    order = np.lexsort(((sources - rank - 1) % len(counts), rows))
    return sources[order], rows[order]


class Wave(NamedTuple):
    """The rows of a part of a walk. Of each peer: how many are visited, the sum of what they count for, and which they
    are, from `first` until before `last`. All are [num_ranks].
    """

    visited: np.ndarray
    rows: np.ndarray
    first: np.ndarray
    last: np.ndarray


Cut = list[list[Wave]]
"""The waves of each group of warps."""


@dataclass(frozen=True)
class Visits:
    """The rows of a walk in its order: peer, which row of that peer, and what it counts for."""

    peers: np.ndarray
    which: np.ndarray
    rows: np.ndarray | None = None

    def cut(self, num_ranks: int, width: int, groups: int) -> Cut:
        """Cuts the walk for `width` warps, as many rows at a time, and each wave between groups of neighbouring warps.
        Where all rows are one wave there is one group.
        """
        groups = groups if len(self.peers) > width else 1
        places = np.arange(len(self.peers))
        group_of, wave_of = places % width * groups // width, places // width
        rows = np.ones(len(places)) if self.rows is None else self.rows
        size = (-(-len(places) // width), num_ranks)
        cut: Cut = []
        for group in range(groups):
            mine = group_of == group
            at = (wave_of[mine], self.peers[mine])
            visited, summed, first, last = np.zeros(size), np.zeros(size), np.full(size, np.inf), np.zeros(size)
            np.add.at(visited, at, 1)
            np.add.at(summed, at, rows[mine])
            np.minimum.at(first, at, self.which[mine])
            np.maximum.at(last, at, self.which[mine] + 1)
            cut.append([Wave(*parts) for parts in zip(visited, summed, first, last, strict=True)])
        return cut


@dataclass(frozen=True)
class Orders:
    """incoming: of the rows that came, where they are expanded or sent back: dedup, reduce, pipelined. arrived: of the
    rows that `balanced` brings to their experts, and so of the results of each expert.

    groups: of the warps that visit rows source by source. Each group goes on by itself: those whose rows were quick run
    ahead, and so the ranks drift apart. 1: all warps of a rank stay in step, and no rank gets away from the others.
    """

    incoming: Order
    arrived: Order
    groups: int = 8


BEFORE = Orders(by_source, by_source)
IN_STEP = Orders(by_source, by_source, groups=1)
AFTER = Orders(in_turns, by_source)


@dataclass(frozen=True)
class Grid:
    """Of every kernel."""

    blocks: int = 132
    warps: int = 16

    @property
    def all_warps(self) -> int:
        return self.blocks * self.warps

    @property
    def sending_warps(self) -> int:
        """One block counts."""
        return max(1, self.blocks - 1) * self.warps


class Routing:
    """Rows of a call.

    topk_idx: of each rank, [tokens, topk]; each choice is an expert. choices: of each rank, [tokens, num_ranks], how
    many experts of a token are at each rank. once, each: see count_rows().
    """

    def __init__(self, topk_idx: list[np.ndarray], num_experts: int) -> None:
        self.num_ranks = len(topk_idx)
        self.num_local = num_experts // self.num_ranks
        self.topk_idx = topk_idx
        self.ranks = [chosen // self.num_local for chosen in topk_idx]
        self.choices = [(topk_idx[:, :, None] == np.arange(self.num_ranks)).sum(axis=1) for topk_idx in self.ranks]
        self.once, self.each = count_rows(topk_idx, self.num_ranks, num_experts)

    def expert_rows(self, rank: int, order: Order | None, grid: Grid) -> tuple[Visits, Visits]:
        """Rows that come to the experts of a rank, as they are moved there, and as results are sent back: by expert, in
        the order in which they came. No order: blocks are dealt out, over the sources and over the experts.
        """
        counts = self.each[:, rank].tolist()
        if order:
            sources, rows = order(counts, rank)
        else:
            sources, rows = by_source(counts, rank)
            sharers = (grid.blocks - np.arange(self.num_ranks) - 1) // self.num_ranks + 1
            step = rows // (np.maximum(sharers, 1)[sources] * grid.warps)
            moved = np.lexsort((rows, step))
            sources, rows = sources[moved], rows[moved]
        experts = [topk_idx[topk_idx // self.num_local == rank] % self.num_local for topk_idx in self.topk_idx]
        starts = np.cumsum([0, *map(len, experts)])[:-1]
        expert = np.concatenate(experts)[starts[sources] + rows]
        lie = np.argsort(expert, kind="stable")
        if order is None:
            lie = lie[self._dealt_out(expert[lie], grid)]
        return Visits(sources, rows), Visits(sources[lie], rows[lie])

    def _dealt_out(self, expert: np.ndarray, grid: Grid) -> np.ndarray:
        """Blocks are dealt out over the experts: all of these are served side by side."""
        starts = np.searchsorted(expert, np.arange(self.num_local))
        sharers = np.maximum((grid.blocks - np.arange(self.num_local) - 1) // self.num_local + 1, 1)
        place = np.arange(len(expert)) - starts[expert]
        return np.lexsort((expert, place // (sharers[expert] * grid.warps)))


class Moved(NamedTuple):
    """What the rows of a wave mean for a rank.

    local: rows that it reads, or writes beside what it sends. sent: rows to each rank, written to that rank's memory.
    makes: the channel of what is sent. takes: the channel of what is taken, and the wave.
    """

    local: float
    sent: np.ndarray | None = None
    makes: int = 0
    takes: tuple[int, Wave] | None = None


class Call:
    """The walks of one call of a variant. Resources are what each rank sends, what it receives, and its memory.

    walks: to simulate. kernels: of each rank, the walks of each of its kernels. num_dispatch: how many kernels of a
    call are its dispatch. partitions: of the pipelined variant. Channels are even for what goes out, odd for what comes
    back; each has a stream from each rank to each.
    """

    def __init__(
        self, variant: str, routing: Routing, row_bytes: int, orders: Orders, grid: Grid, partitions: int = 1
    ) -> None:
        self.routing = routing
        self.row_bytes = row_bytes
        self.orders = orders
        self.grid = grid
        self.walks: list[Walk] = []
        self.kernels: list[list[list[int]]] = [[] for _ in range(routing.num_ranks)]
        if variant == "pipelined":
            self.num_dispatch = 0
            self._pipelined(partitions)
        elif variant in ("dedup", "reduce"):
            self.num_dispatch = 1
            self._deduplicated(reduces=variant == "reduce")
        else:
            self.num_dispatch = 2
            self._row_for_each_choice(variant)

    def channel_of(self, stream: int) -> int:
        return stream // self.routing.num_ranks**2

    # ---- what all variants are made of

    def _stream(self, channel: int, src_rank: int, dst_rank: int) -> int:
        return (channel * self.routing.num_ranks + src_rank) * self.routing.num_ranks + dst_rank

    def _part(self, rank: int, moved: Moved, share: float = 1.0) -> Part:
        """share: of the warps of its side that this part has; as much faster is it than one of fewer."""
        num_ranks = self.routing.num_ranks
        uses = np.zeros(3 * num_ranks)
        uses[2 * num_ranks + rank] += moved.local
        makes: dict[int, float] = {}
        takes: dict[int, tuple[float, float]] = {}
        if moved.sent is not None:
            uses[2 * num_ranks :] += moved.sent
            abroad = np.where(np.arange(num_ranks) == rank, 0, moved.sent)
            uses[rank] = abroad.sum()
            uses[num_ranks : 2 * num_ranks] = abroad
            for peer in np.flatnonzero(moved.sent).tolist():
                makes[self._stream(moved.makes, rank, peer)] = moved.sent[peer]
        if moved.takes is not None:
            channel, wave = moved.takes
            for peer in np.flatnonzero(wave.visited).tolist():
                takes[self._stream(channel, peer, rank)] = (wave.first[peer], wave.last[peer])
        uses *= self.row_bytes
        return Part((uses[rank] or uses[2 * num_ranks :].sum()) / share, uses, makes, takes)

    def _parts(self, rank: int, cut: Cut, moved: Callable[[Wave], Moved]) -> list[list[Part]]:
        """Of each group of warps."""
        return [[self._part(rank, moved(wave), 1 / len(cut)) for wave in waves] for waves in cut]

    def _cut(self, visits: Visits, width: int, order: Order | None = None) -> Cut:
        """All warps are as fast where the rows of a walk are mixed; those that visit source by source are not."""
        return visits.cut(self.routing.num_ranks, width, self.orders.groups if order is by_source else 1)

    def _add_kernel(self, rank: int, *walks: list[Part], after: list[int] | None = None) -> None:
        """after: walks of other ranks that it waits for before all else."""
        before = self.kernels[rank][-1] if self.kernels[rank] else []
        self.kernels[rank].append(list(range(len(self.walks), len(self.walks) + len(walks))))
        self.walks += [Walk([part for part in parts if part.size], (*before, *(after or []))) for parts in walks]

    def _last_walks(self) -> list[int]:
        return [walk for kernels in self.kernels for walk in kernels[-1]]

    def _sum_up(self, rank: int, rows: np.ndarray, num_tokens: int, channel: int) -> Part:
        """Reads results, [num_ranks], and writes a row for each token."""
        wave = Wave(rows, rows, np.zeros(len(rows)), rows)
        return self._part(rank, Moved(rows.sum() + num_tokens, takes=(channel, wave)))

    # ---- one row for each choice: flag, token, fused, balanced

    def _row_for_each_choice(self, variant: str) -> None:
        num_ranks, all_warps = self.routing.num_ranks, self.grid.all_warps
        waits_for_all = variant == "flag"
        for rank, ranks in enumerate(self.routing.ranks):
            cut = self._cut(Visits(ranks.ravel(), np.zeros(ranks.size)), self.grid.sending_warps)
            self._add_kernel(rank, *self._parts(rank, cut, lambda wave: Moved(wave.rows.sum(), wave.rows, 0)))
        order = self.orders.arrived if variant == "balanced" else None
        senders = self._last_walks() if waits_for_all else []
        results = []
        for rank in range(num_ranks):
            moved, back = self.routing.expert_rows(rank, order, self.grid)
            cut = self._cut(moved, all_warps)
            brought = self._parts(rank, cut, lambda wave: Moved(2 * wave.rows.sum(), takes=(0, wave)))
            self._add_kernel(rank, *brought, after=senders)
            if variant in ("flag", "token"):
                self._add_kernel(rank, [self._part(rank, Moved(2 * len(back.peers)))])
            results.append(back)
        for rank, back in enumerate(results):
            cut = self._cut(back, all_warps, order)
            self._add_kernel(rank, *self._parts(rank, cut, lambda wave: Moved(wave.rows.sum(), wave.rows, 1)))
        senders = self._last_walks() if waits_for_all else []
        for rank, chosen in enumerate(self.routing.topk_idx):
            self._add_kernel(rank, [self._sum_up(rank, self.routing.each[rank], len(chosen), 1)], after=senders)

    # ---- one row for each token and rank: dedup, reduce, pipelined

    def _send_rows(self, rank: int, tokens: slice, channel: int) -> list[Part]:
        """Turned from token to token, as send_rows() visits peers."""
        choices = self.routing.choices[rank]
        num_ranks = self.routing.num_ranks
        token = np.arange(len(choices))[tokens]
        peers = (rank + np.arange(num_ranks)[None, :] + token[:, None]) % num_ranks
        peers = peers[np.take_along_axis(choices[tokens], peers, axis=1) > 0]
        cut = self._cut(Visits(peers, np.zeros(len(peers))), self.grid.sending_warps // 2)
        return self._parts(rank, cut, lambda wave: Moved(wave.rows.sum(), wave.rows, channel))[0]

    def _incoming(self, rank: int, tokens: slice, width: int) -> Cut:
        """Rows that came, as they are visited; each counts for as many as it has choices here."""
        choices = [chosen[tokens, rank] for chosen in self.routing.choices]
        choices = [chosen[chosen > 0] for chosen in choices]
        counts = list(map(len, choices))
        sources, rows = self.orders.incoming(counts, rank)
        starts = np.cumsum([0, *counts])[:-1]
        visits = Visits(sources, rows, np.concatenate(choices)[starts[sources] + rows])
        return self._cut(visits, width, self.orders.incoming)

    def _deduplicated(self, *, reduces: bool) -> None:
        def expand(wave: Wave) -> Moved:
            return Moved(wave.visited.sum() + wave.rows.sum(), takes=(0, wave))

        def send_back(wave: Wave) -> Moved:
            return Moved(wave.rows.sum(), wave.visited if reduces else wave.rows, 1)

        every = slice(None)
        for rank in range(self.routing.num_ranks):
            cut = self._incoming(rank, every, self.grid.sending_warps // 2)
            self._add_kernel(rank, self._send_rows(rank, every, 0), *self._parts(rank, cut, expand))
        results = self.routing.once if reduces else self.routing.each
        for rank, chosen in enumerate(self.routing.topk_idx):
            cut = self._incoming(rank, every, self.grid.all_warps // 2)
            sum_up = self._sum_up(rank, results[rank], len(chosen), 1)
            self._add_kernel(rank, [sum_up], *self._parts(rank, cut, send_back))

    def _pipelined(self, partitions: int) -> None:
        most = max(map(len, self.routing.topk_idx))
        size = max(1, -(-most // partitions))
        tokens = [slice(begin, begin + size) for begin in range(0, most, size)]
        for rank in range(self.routing.num_ranks):
            token_side: list[Part] = []
            expert_side: list[list[Part]] = [[] for _ in range(self.orders.groups)]
            for number in range(len(tokens) + 1):
                if number < len(tokens):
                    token_side += self._send_rows(rank, tokens[number], 2 * number)
                    for side, parts in zip(expert_side, self._serve(rank, tokens[number], 2 * number), strict=False):
                        side += parts
                if number:  # two are in flight
                    choices = self.routing.choices[rank][tokens[number - 1]]
                    token_side.append(self._sum_up(rank, (choices > 0).sum(axis=0), len(choices), 2 * number - 1))
            self._add_kernel(rank, token_side, *expert_side)

    def _serve(self, rank: int, tokens: slice, channel: int) -> list[list[Part]]:
        """Experts work on a row where it arrived: it is read once."""
        cut = self._incoming(rank, tokens, self.grid.sending_warps // 2)

        def serve(wave: Wave) -> Moved:
            return Moved(wave.visited.sum(), wave.visited, channel + 1, (channel, wave))

        return self._parts(rank, cut, serve)
