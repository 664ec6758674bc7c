"""Who is behind each wait: the lateness of its source split by what took longer there than at the waiter.

Both are looked at from the last event that ordered them: the source until it released the wait, the waiter until it
began to wait. Every category of time in which the source spent more gets its share: a phase of work, the host's gaps,
the link, waits without a cause on record, and waiting, which is passed on to the causes of those waits.

What a wait costs with everything that it caused is a sparse triangular system over the waits, latest first. A wait k
passes x_k * s_k on to the waits of its source in a range of time, in proportion to their lateness w_j. With the density
d_k = x_k * s_k / (sum of w over the range), a wait receives w_j times the sum of the densities of all ranges that it
lies in. That sum changes only where ranges begin or end, so along a run (and along the history of a stream) each
unknown is its later neighbour's plus the ranges that end here, minus those that began behind it: a few entries a row,
however long the ranges are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.causes.gaps import divide_gaps
from tracekern.analysis.causes.history import History, Moments, bisect_right
from tracekern.analysis.causes.order import Edges, is_sorted, last_ordered
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.timeline.model import Float64, Int64, Mask, Timeline

_CHUNK = 1 << 13


@dataclass(frozen=True)
class Ranges:
    """[n] for each wait the waits of its source since the two were ordered: two slices of a WaitSequence."""

    own_first: Int64
    own_stop: Int64
    """Of WaitSequence.by_run: in the launch that released the wait."""
    past_first: Int64
    past_stop: Int64
    """Of WaitSequence.by_stream: in earlier launches."""
    total_ns: Int64


@dataclass(frozen=True)
class WaitSequence:
    """Some waits with a time and a weight each, as they follow each other on their run, and on their stream."""

    edge: Int64
    """[n] index into Edges, by (run, time)."""
    run: Int64
    time: Int64
    """When what the weight measures was over."""
    weight_ns: Int64
    by_stream: Int64
    """[m] indices into `edge`: those in the history of a stream, by (stream, time)."""
    stream: Int64
    """[m]"""

    @classmethod
    def of(cls, graph: EventGraph, edges: Edges, time: Int64, weight_ns: Int64) -> WaitSequence:
        """The waits of some weight; time, weight_ns: [num_edges]."""
        edge = np.flatnonzero(weight_ns > 0)
        if not is_sorted(edges.waiter[edge], time[edge]):
            edge = edge[np.lexsort((time[edge], edges.waiter[edge]))]
        run, time, weight_ns = edges.waiter[edge], time[edge], weight_ns[edge]
        launch = graph.runs.launch
        decides = graph.schedule.last_run[launch] == np.arange(len(launch))
        in_history = np.flatnonzero(decides[run])
        stream = graph.schedule.stream[launch[run[in_history]]].astype(np.int64)
        by_time = np.lexsort((time[in_history], stream))
        return cls(edge, run, time, weight_ns, in_history[by_time], stream[by_time])

    def ranges(self, graph: EventGraph, asked: Edges, since: Int64) -> Ranges:
        """Waits with since < time < release; those of earlier launches by the history of the stream."""
        launch = graph.runs.launch[asked.source]
        began = graph.schedule.start[launch]
        low, high = _stretch_of(self.run, asked.source, len(graph.runs))
        own_first = bisect_right(self.time, low, high, np.maximum(since, began - 1))
        own_stop = np.maximum(bisect_right(self.time, low, high, asked.release - 1), own_first)
        stream = graph.schedule.stream[launch].astype(np.int64)
        low, high = _stretch_of(self.stream, stream, int(graph.schedule.stream.max()) + 1)
        past_time = self.time[self.by_stream]
        past_first = bisect_right(past_time, low, high, since)
        past_stop = np.maximum(bisect_right(past_time, low, high, np.minimum(began, asked.release - 1)), past_first)
        own, past = (np.append(0, np.cumsum(w)) for w in (self.weight_ns, self.weight_ns[self.by_stream]))
        total = own[own_stop] - own[own_first] + past[past_stop] - past[past_first]
        return Ranges(own_first, own_stop, past_first, past_stop, total)


@dataclass(frozen=True)
class Shares:
    """How each late wait is split. Shares of a wait sum to 1."""

    edge: Int64
    """[n] late waits, by (run, release): index into Edges."""
    late_ns: Int64
    charged_ns: Int64
    """[n] late_ns of those waits that are to be charged; 0 for others, which only pass on."""
    waiting: Float64
    """[n] share of what the source waited itself."""
    link: Float64
    """[n] share of the link in the source's own waits."""
    unexplained: Float64
    """[n] share of the source's own waits without a cause on record; 1 where nothing took longer at the source."""
    direct_wait: Int64
    """[m] the rest, one row a wait and category: index into `edge`, ..."""
    direct_category: Int64
    """... category: a phase, then the hosts' gaps, then other gaps, ..."""
    direct_share: Float64
    """... and share."""
    late_waits: WaitSequence
    link_waits: WaitSequence
    late_ranges: Ranges
    link_ranges: Ranges


def _stretch_of(values: Int64, wanted: Int64, count: int) -> tuple[Int64, Int64]:
    """([n] first, [n] stop) of those equal to each wanted one; `values` are sorted, and all are in 0..count."""
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(values, minlength=count), out=bounds[1:])
    return bounds[wanted], bounds[wanted + 1]


def split_waits(
    timeline: Timeline, graph: EventGraph, waits: Waits, edges: Edges, link_ns: Int64, is_charged: Mask
) -> Shares:
    """link_ns: [num_edges] drain and visibility of each wait. is_charged: [num_waits]."""
    late_waits = WaitSequence.of(graph, edges, edges.release, waits.late_ns[edges.wait])
    link_waits = WaitSequence.of(graph, edges, edges.end, link_ns)
    asked = edges.take(late_waits.edge)
    since = last_ordered(timeline, graph, waits, edges, late_waits.edge)
    late_ranges, link_ranges = (sequence.ranges(graph, asked, since) for sequence in (late_waits, link_waits))
    history = History(timeline, graph, waits)
    moments = history.of_runs(
        np.concatenate([asked.source, asked.source, asked.waiter, asked.waiter]),
        np.concatenate([asked.release, since, asked.begin, since]),
    )
    columns = _split(history, moments, late_ranges.total_ns, link_ranges.total_ns)
    direct = divide_gaps(history, moments, *columns[3:])
    charged_ns = np.where(is_charged[asked.wait], late_waits.weight_ns, 0)
    ranges = (late_waits, link_waits, late_ranges, link_ranges)
    return Shares(late_waits.edge, late_waits.weight_ns, charged_ns, *columns[:3], *direct, *ranges)


def _split(
    history: History, moments: Moments, late_ns: Int64, link_ns: Int64
) -> tuple[Float64, Float64, Float64, Int64, Int64, Float64]:
    """The columns of Shares from `waiting` to `direct_share`, some waits at a time.

    moments: of all waits the source's release, its `since`, the waiter's begin, its `since`.
    """
    count = len(late_ns)
    slots = history.slots(moments)
    waiting, link, unexplained = np.zeros(count), np.zeros(count), np.zeros(count)
    rows, categories, values = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0)]
    for first in range(0, count, _CHUNK):
        part = slice(first, first + _CHUNK)
        source, source_since, waiter, waiter_since = (
            history.spent(moments.take(which), slots[:, which])
            for which in (
                slice(quarter + first, quarter + min(first + _CHUNK, count)) for quarter in np.arange(4) * count
            )
        )
        at_waiter = np.maximum(waiter - waiter_since, 0)
        at_source = np.maximum(source - source_since, 0)
        at_source[:, history.late] = late_ns[part]
        at_source[:, history.link] = link_ns[part]
        longer = np.maximum(at_source - at_waiter, 0)
        total = longer.sum(axis=1)
        scale = 1 / np.maximum(total, 1)
        unexplained[part] = np.where(total == 0, 1, longer[:, history.unknown] * scale)
        waiting[part] = longer[:, history.late] * scale
        link[part] = longer[:, history.link] * scale
        row, category = np.nonzero(longer[:, : history.unknown])
        rows.append(row + first)
        categories.append(category)
        values.append(longer[row, category] * scale[row])
    return waiting, link, unexplained, np.concatenate(rows), np.concatenate(categories), np.concatenate(values)


def solve_costs(shares: Shares, late_ns: Float64) -> Float64:
    """[n, m] ns of waiting that each late wait accounts for: its own lateness and what was passed on to it.

    late_ns: [n, m] its own lateness, in m cases that are split alike.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import spsolve_triangular

    sequence, ranges, weight = shares.late_waits, shares.late_ranges, shares.late_ns
    count, num_past = len(weight), len(sequence.by_stream)
    if not count:
        return np.zeros_like(late_ns)
    rate = np.where(ranges.total_ns > 0, shares.waiting / np.maximum(ranges.total_ns, 1), 0.0)
    past_of = np.full(count, -1, np.int64)
    past_of[sequence.by_stream] = np.arange(num_past)

    # Unknowns: the density at each wait on its run, then at each wait in the history of its stream.
    rows, sources, signs = _range_ends(sequence, ranges, count, np.flatnonzero(rate > 0))
    entries = [(rows, sources, -signs * (rate * weight)[sources])]
    has_past = past_of[sources] >= 0
    entries.append((rows[has_past], count + past_of[sources[has_past]], entries[0][2][has_past]))
    for first, key in ((0, sequence.run), (count, sequence.stream)):
        same = np.flatnonzero(key[1:] == key[:-1])
        entries.append((first + same, first + same + 1, np.full(len(same), -1.0)))
    size = count + num_past
    entries.append((np.arange(size), np.arange(size), np.ones(size)))
    known = np.zeros((size, late_ns.shape[1]))
    np.add.at(known, rows, (signs * rate[sources])[:, None] * late_ns[sources])

    time = np.concatenate([sequence.time, sequence.time[sequence.by_stream]])
    place = np.empty(size, np.int32)  # the solver counts in 32 bits, and scipy before 1.16 leaves that to its caller
    place[np.lexsort((np.concatenate([np.arange(count), np.arange(num_past)]), time))[::-1]] = np.arange(size)
    row, column, value = (np.concatenate(part) for part in zip(*entries, strict=True))
    matrix = coo_array((value, (place[row], place[column])), shape=(size, size)).tocsc()
    right = np.empty_like(known)
    right[place] = known
    density = spsolve_triangular(matrix, right, lower=True, unit_diagonal=True)[place]
    received = density[:count]
    received[sequence.by_stream] += density[count:]
    costs: Float64 = late_ns + weight[:, None] * np.maximum(received, 0)
    return costs


def spread(sequence: WaitSequence, ranges: Ranges, amount_ns: Float64) -> Float64:
    """[num_waits of the sequence] ns that each receives when amount_ns[k] is spread over range k by weight."""
    count, num_past = len(sequence.edge), len(sequence.by_stream)
    rate = np.where(ranges.total_ns > 0, amount_ns / np.maximum(ranges.total_ns, 1), 0.0)
    density = []
    for size, first, stop in (
        (count, ranges.own_first, ranges.own_stop),
        (num_past, ranges.past_first, ranges.past_stop),
    ):
        steps = np.bincount(first, rate, size + 1) - np.bincount(stop, rate, size + 1)
        density.append(np.maximum(np.cumsum(steps)[:size], 0))
    received = density[0]
    received[sequence.by_stream] += density[1]
    return received * sequence.weight_ns


def _range_ends(sequence: WaitSequence, ranges: Ranges, count: int, some: Int64) -> tuple[Int64, Int64, Float64]:
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
