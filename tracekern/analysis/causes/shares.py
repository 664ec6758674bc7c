"""Who is behind each wait: where its source and the waiter itself spent different times since something ordered them.

Both are looked at from that moment on: the source until it released the wait, the waiter until it began to wait. What
the source spent more time with makes the waiter wait: a phase of work, the host's gaps, the link, waits without a cause
on record, and waiting, which has causes of its own. What the waiter spent more time with shortens the wait.

Shares follow the largest of these, `charges` adds all of them up. Either way what a wait leads to is a sparse
triangular system over the waits, latest first: a wait k passes something on to all waits of a run in a range of time.
A wait receives the sum of the densities of all ranges that it lies in. That sum changes only where ranges begin or end,
so along a run (and along the history of a stream) each unknown is its later neighbour's plus the ranges that end here,
minus those that began behind it: a few entries a row, however long the ranges are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.causes.gaps import host_part
from tracekern.analysis.causes.history import History, Moments, bisect_right
from tracekern.analysis.causes.order import Edges, is_sorted, last_ordered
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.errors import packages_for
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline

_CHUNK = 1 << 13
_ROUND_UP = 0.5 + 1e-6
"""Halves go up, whatever floats make of them."""


@dataclass(frozen=True)
class Ranges:
    """[n] for each wait what its source, or the waiter, had since the two were ordered: two slices of a Sequence."""

    own_first: Int64
    own_stop: Int64
    """In the launch that released the wait, or that waited."""
    past_first: Int64
    past_stop: Int64
    """Of Sequence.by_stream: in earlier launches."""
    total_ns: Int64

    @property
    def count(self) -> Int64:
        return self.own_stop - self.own_first + self.past_stop - self.past_first

    def take(self, which: Int64) -> Ranges:
        columns = (self.own_first, self.own_stop, self.past_first, self.past_stop, self.total_ns)
        return Ranges(*(column[which] for column in columns))


@dataclass(frozen=True)
class Sequence:
    """Waits or spans with a time and a weight each, as they follow each other on their run, and on their stream."""

    item: Int64
    """[n] index into what it was made of, by (run, time)."""
    run: Int64
    time: Int64
    """When what the weight measures was over."""
    weight_ns: Int64
    by_stream: Int64
    """[m] indices into `item`: those in the history of a stream, by (stream, time)."""
    stream: Int64
    """[m]"""

    @classmethod
    def of(cls, graph: EventGraph, run: Int64, time: Int64, weight_ns: Int64) -> Sequence:
        """The items of some weight; all columns are [num_items]."""
        item = np.flatnonzero(weight_ns > 0)
        if not is_sorted(run[item], time[item]):
            item = item[np.lexsort((time[item], run[item]))]
        run, time, weight_ns = run[item], time[item], weight_ns[item]
        launch = graph.runs.launch
        decides = graph.schedule.last_run[launch] == np.arange(len(launch))
        in_history = np.flatnonzero(decides[run])
        stream = graph.schedule.stream[launch[run[in_history]]].astype(np.int64)
        by_time = np.lexsort((time[in_history], stream))
        return cls(item, run, time, weight_ns, in_history[by_time], stream[by_time])

    def ranges(self, graph: EventGraph, run: Int64, since: Int64, until: Int64) -> Ranges:
        """[n] what each run had with since < time <= until; in earlier launches by the history of its stream."""
        launch = graph.runs.launch[run]
        began = graph.schedule.start[launch]
        low, high = _stretch_of(self.run, run, len(graph.runs))
        own_first = bisect_right(self.time, low, high, np.maximum(since, began - 1))
        own_stop = np.maximum(bisect_right(self.time, low, high, until), own_first)
        stream = graph.schedule.stream[launch].astype(np.int64)
        low, high = _stretch_of(self.stream, stream, int(graph.schedule.stream.max()) + 1)
        past_time = self.time[self.by_stream]
        past_first = bisect_right(past_time, low, high, since)
        past_stop = np.maximum(bisect_right(past_time, low, high, np.minimum(began, until)), past_first)
        own, past = (np.append(0, np.cumsum(w)) for w in (self.weight_ns, self.weight_ns[self.by_stream]))
        total = own[own_stop] - own[own_first] + past[past_stop] - past[past_first]
        return Ranges(own_first, own_stop, past_first, past_stop, total)


@dataclass(frozen=True)
class Excess:
    """[m] rows by wait: what took longer, or shorter, by category."""

    wait: Int64
    """Index into Shares.edge."""
    category: Int64
    """Of the History: a phase, the gaps before kernels, or waits without a cause on record."""
    ns: Int64


@dataclass(frozen=True)
class Shares:
    """How each late wait is split. Shares of a wait sum to 1."""

    edge: Int64
    """[n] late waits, by (run, release): index into Edges."""
    since: Int64
    """[n] when waiter and source were ordered."""
    late_ns: Int64
    charged_ns: Int64
    """[n] late_ns of those waits that are to be charged; 0 for others, which only pass on."""
    waiting: Float64
    """[n] share of what the source waited itself."""
    link: Float64
    """[n] share of the link in the source's own waits."""
    unexplained: Float64
    """[n] share of the source's own waits without a cause on record; 1 where nothing took longer at the source."""
    direct_share: Float64
    """[m] share of each row of `longer`; 0 for those without a cause on record."""
    longer: Excess
    """What took longer at the source than at the waiter."""
    of_host_ns: Int64
    """[m] of each row of `longer` that is a gap before a kernel, what surely was the host's."""
    late_waits: Sequence
    link_waits: Sequence
    source: Side
    waiter: Side


@dataclass(frozen=True)
class Side:
    """[n] what the source, or the waiter, of each wait did since the two were ordered."""

    late_ns: Int64
    link_ns: Int64
    late_ranges: Ranges
    link_ranges: Ranges
    excess: Excess
    """By how much phases took longer than usual for as many pieces as both did; of other categories, than the shorter
    of the two."""


def _stretch_of(values: Int64, wanted: Int64, count: int) -> tuple[Int64, Int64]:
    """([n] first, [n] stop) of those equal to each wanted one; `values` are sorted, and all are in 0..count."""
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(values, minlength=count), out=bounds[1:])
    return bounds[wanted], bounds[wanted + 1]


def split_waits(
    timeline: Timeline, graph: EventGraph, waits: Waits, edges: Edges, link_ns: Int64, is_charged: Mask
) -> Shares:
    """link_ns: [num_edges] drain and visibility of each wait. is_charged: [num_waits]."""
    late_waits = Sequence.of(graph, edges.waiter, edges.release, waits.late_ns[edges.wait])
    link_waits = Sequence.of(graph, edges.waiter, edges.end, link_ns)
    asked = edges.take(late_waits.item)
    since = last_ordered(timeline, graph, waits, edges, late_waits.item)
    ranges = [
        sequence.ranges(graph, run, since, until)
        for run, end in ((asked.source, asked.release), (asked.waiter, asked.begin))
        for sequence, until in ((late_waits, np.minimum(end, asked.release - 1)), (link_waits, end))
    ]
    history = History(timeline, graph, waits)
    moments = history.of_runs(
        np.concatenate([asked.source, asked.source, asked.waiter, asked.waiter]),
        np.concatenate([asked.release, since, asked.begin, since]),
    )
    has_waits = np.stack([of.total_ns > 0 for of in ranges], axis=1)
    (late, link, waiter_late, waiter_link), excesses = _compare(
        history, moments, has_waits, graph.schedule.rank[graph.runs.launch[asked.waiter]]
    )
    longer, of_source, of_waiter = excesses
    source = Side(late, link, ranges[0], ranges[1], of_source)
    waiter = Side(waiter_late, waiter_link, ranges[2], ranges[3], of_waiter)
    charged_ns = np.where(is_charged[asked.wait], late_waits.weight_ns, 0)
    shares = _shares(history, source, waiter, longer)
    columns = (late_waits.item, since, late_waits.weight_ns, charged_ns)
    of_host_ns = host_part(history, moments, longer.wait, longer.category, longer.ns)
    return Shares(*columns, *shares, longer, of_host_ns, late_waits, link_waits, source, waiter)


def _compare(
    history: History, moments: Moments, has_waits: Mask, waiter_rank: Int32
) -> tuple[Int64, tuple[Excess, Excess, Excess]]:
    """([4, n] lateness and link of the source, of the waiter; what took longer at the source than at the waiter, what
    at either took longer than usual).

    moments: of all waits the source's release, its `since`, the waiter's begin, its `since`. has_waits: [n, 4] False
    where no wait on record can take the lateness, or the link. waiter_rank: [n].
    """
    count, typical_ns = len(has_waits), history.typical_ns()
    spent_slots, begun_slots = history.slots(moments)
    waited = np.zeros((4, count), np.int64)
    found = _Rows(), _Rows(), _Rows()
    for first in range(0, count, _CHUNK):
        part, quarters = slice(first, first + _CHUNK), np.arange(4) * count
        whichs = [slice(quarter + first, quarter + min(first + _CHUNK, count)) for quarter in quarters]
        spent = [history.spent(moments.take(which), spent_slots[:, which]) for which in whichs]
        begun = [history.begun(moments.take(which), begun_slots[:, which]) for which in whichs]
        source, waiter = (np.maximum(spent[place] - spent[place + 1], 0) for place in (0, 2))
        for place, (at, column) in enumerate(
            (at, column) for at in (source, waiter) for column in (history.late, history.link)
        ):
            waited[place, part] = np.where(has_waits[part, place], at[:, column], 0)
        source, waiter = source[:, : history.late], waiter[:, : history.late]
        pieces = np.minimum(*(np.maximum(begun[place] - begun[place + 1], 0) for place in (0, 2)))
        usual = np.minimum(source, waiter)
        typical = typical_ns[waiter_rank[part]]
        in_pieces = np.floor(pieces * typical + _ROUND_UP).astype(np.int64)
        np.copyto(usual[:, : history.gap], in_pieces, where=typical > 0)
        for rows, more in zip(found, (np.maximum(source - waiter, 0), source - usual, waiter - usual), strict=True):
            rows.add(more, first)
    longer, of_source, of_waiter = (rows.join() for rows in found)
    return waited, (longer, of_source, of_waiter)


class _Rows:
    """Collects the rows of an Excess."""

    def __init__(self) -> None:
        self._parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))]

    def add(self, ns: Int64, first: int) -> None:
        """ns: [m, num_categories] of the waits from `first` on."""
        row, category = np.nonzero(ns)
        self._parts.append((row + first, category, ns[row, category]))

    def join(self) -> Excess:
        return Excess(*(np.concatenate(column) for column in zip(*self._parts, strict=True)))


def _shares(history: History, source: Side, waiter: Side, longer: Excess) -> tuple[Float64, Float64, Float64, Float64]:
    """The columns of Shares from `waiting` to `direct_share`: the parts that took longer at the source."""
    late = np.maximum(source.late_ns - waiter.late_ns, 0)
    link = np.maximum(source.link_ns - waiter.link_ns, 0)
    is_known = longer.category < history.unknown
    known, unknown = (np.bincount(longer.wait[which], longer.ns[which], len(late)) for which in (is_known, ~is_known))
    total = late + link + known + unknown
    scale = 1 / np.maximum(total, 1)
    unexplained = np.where(total == 0, 1, unknown * scale)
    return late * scale, link * scale, unexplained, longer.ns * scale[longer.wait] * is_known


def solve_costs(shares: Shares, late_ns: Float64) -> Float64:
    """[n, m] ns of waiting that each late wait accounts for: its own lateness and what was passed on to it.

    late_ns: [n, m] its own lateness, in m cases that are split alike. Only what took longer at the source counts: by
    the shares.
    """
    ranges, weight = shares.source.late_ranges, shares.late_ns.astype(float)
    rate = np.where(ranges.total_ns > 0, shares.waiting / np.maximum(ranges.total_ns, 1), 0.0)
    received = _solve(shares.late_waits, [(ranges, rate)], late_ns, weight)
    costs: Float64 = late_ns + weight[:, None] * np.maximum(received, 0)
    return costs


def solve_weights(shares: Shares, own: Float64) -> Float64:
    """[n] by how many ns all waiting would shrink if each wait were late by 1 ns less; [n] own: what it counts itself.

    A wait of the source makes the waiter wait, and one of the waiter's own shortens the wait: signs differ.
    """
    terms = [
        (side.late_ranges, sign * side.late_ns / np.maximum(side.late_ranges.total_ns, 1))
        for side, sign in ((shares.source, 1.0), (shares.waiter, -1.0))
    ]
    return own + _solve(shares.late_waits, terms, own[:, None], np.ones(len(own)))[:, 0]


def _solve(sequence: Sequence, terms: list[tuple[Ranges, Float64]], amount: Float64, factor: Float64) -> Float64:
    """[n, m] density that each wait receives: the sum of rate[k] * x[k] over all waits k in whose range it lies.

    x = amount + factor * received. terms: ranges of each wait k, and its rates. amount: [n, m], factor: [n].
    """
    with packages_for("saying why ranks waited"):
        from scipy.sparse import coo_array
        from scipy.sparse.linalg import spsolve_triangular

    count, num_past = len(factor), len(sequence.by_stream)
    if not count:
        return np.zeros_like(amount)
    past_of = np.full(count, -1, np.int64)
    past_of[sequence.by_stream] = np.arange(num_past)

    # Unknowns: the density at each wait on its run, then at each wait in the history of its stream.
    size = count + num_past
    known = np.zeros((size, amount.shape[1]))
    entries = [(np.arange(size), np.arange(size), np.ones(size))]
    for ranges, rate in terms:
        rows, sources, signs = _range_ends(sequence, ranges, count, np.flatnonzero(rate))
        passed = signs * rate[sources]
        entries.append((rows, sources, -passed * factor[sources]))
        has_past = past_of[sources] >= 0
        entries.append((rows[has_past], count + past_of[sources[has_past]], entries[-1][2][has_past]))
        np.add.at(known, rows, passed[:, None] * amount[sources])
    for first, key in ((0, sequence.run), (count, sequence.stream)):
        same = np.flatnonzero(key[1:] == key[:-1])
        entries.append((first + same, first + same + 1, np.full(len(same), -1.0)))

    time = np.concatenate([sequence.time, sequence.time[sequence.by_stream]])
    place = np.empty(size, np.int32)  # the solver counts in 32 bits, and scipy before 1.16 leaves that to its caller
    place[np.lexsort((np.concatenate([np.arange(count), np.arange(num_past)]), time))[::-1]] = np.arange(size)
    row, column, value = (np.concatenate(part) for part in zip(*entries, strict=True))
    matrix = coo_array((value, (place[row], place[column])), shape=(size, size)).tocsc()
    right = np.empty_like(known)
    right[place] = known
    density = spsolve_triangular(matrix, right, lower=True, unit_diagonal=True)[place]
    received: Float64 = density[:count]
    received[sequence.by_stream] += density[count:]
    return received


def spread(sequence: Sequence, ranges: Ranges, rate: Float64) -> Float64:
    """[num_items of the sequence] the sum of the rates of all ranges that each item lies in."""
    count, num_past = len(sequence.item), len(sequence.by_stream)
    density = []
    for size, first, stop in (
        (count, ranges.own_first, ranges.own_stop),
        (num_past, ranges.past_first, ranges.past_stop),
    ):
        steps = np.bincount(first, rate, size + 1) - np.bincount(stop, rate, size + 1)
        density.append(np.cumsum(steps)[:size])
    received: Float64 = density[0]
    received[sequence.by_stream] += density[1]
    return received


def _range_ends(sequence: Sequence, ranges: Ranges, count: int, some: Int64) -> tuple[Int64, Int64, Float64]:
    """(unknown, wait, sign): the wait's range ends at the unknown (+1), or begins behind it (-1)."""
    rows, sources, signs = [], [], []
    for first, key, low, high in (
        (0, sequence.run, ranges.own_first, ranges.own_stop),
        (count, sequence.stream, ranges.past_first, ranges.past_stop),
    ):
        full = some[high[some] > low[some]]
        rows.append(first + high[full] - 1)
        sources.append(full)
        signs.append(np.ones(len(full)))
        begins = full[low[full] > 0]
        begins = begins[key[low[begins] - 1] == key[low[begins]]]
        rows.append(first + low[begins] - 1)
        sources.append(begins)
        signs.append(-np.ones(len(begins)))
    return np.concatenate(rows), np.concatenate(sources), np.concatenate(signs)
