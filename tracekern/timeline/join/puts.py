"""Joins messages between hosts to the puts of the proxies that carried them.

A kernel's signal asks the proxy of its rank for a put (csrc/comm/proxy_peer.h); both name the receiver and the key of
the channel, and the put the last bits of the call's epoch. A flag for results is raised when all rows have come and
their number: the last of these to arrive carried it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.timeline.join.flows import values_of
from tracekern.timeline.model import OPEN_END, EventClass, Flows, Int64, Timeline, TrackKind, unpack_field
from tracekern.timeline.table import Table

_COMMAND = "command"
_KEYS = {"message": ("local_expert", "slot"), "count": ("local_expert",), "results": ("local_expert",)}
"""Channel -> fields that its signals and the puts of that name have in common."""
_WORDS = {0: "barrier", 16: "ack"}
"""`which` of put_word -> channel: see ControlWord in csrc/comm/heap.h and kAckWord in csrc/moe/low_latency/layout.h."""
_WHOLE = ("is_last", "which", "local_expert", "writes", "n", "slot", "tokens", "token", "epoch_bits")
"""Fields that a put and its arrival have in common, where they have them."""
_TICK_NS, _SECOND, _EPOCHS = 32, 10**9, 8


@dataclass(frozen=True, repr=False)
class Carried(Table):
    """[n] flows that a proxy carried."""

    flow: Int64
    """Index into Timeline.flows."""
    put: Int64
    """Its span, from the moment at which the proxy took the command to the completion of the write."""
    command: Int64
    """The span of the part until it was posted; -1 where that is not on record."""
    came: Int64
    """When the receiver's proxy came to it; OPEN_END where that is not on record."""


def find_carried(timeline: Timeline) -> Carried:
    """The flows of a timeline in ns whose puts are on record."""
    none = np.empty(0, np.int64)
    if not len(timeline.flows) or not timeline.tracks_of(TrackKind.ENGINE).any():
        return Carried(none, none, none, none)
    puts = {name: _spans_named(timeline, f"put_{name}") for name in (*_KEYS, "row", "word")}
    came = {name: _when_they_came(timeline, name, rows) for name, rows in puts.items()}
    put_of, came_of = np.full(len(timeline.spans), -1), np.full(len(timeline.spans), OPEN_END)
    for name in _KEYS:
        signal, place = _asked_by(timeline, name, puts[name])
        put_of[signal], came_of[signal] = puts[name][place], came[name][place]
    which = values_of(timeline, puts["word"], "which")
    for word, name in _WORDS.items():
        of_word = np.flatnonzero(which == word)
        signal, place = _asked_by(timeline, name, puts["word"][of_word])
        put_of[signal], came_of[signal] = puts["word"][of_word[place]], came["word"][of_word[place]]
    _take_last_rows(timeline, put_of, came_of, puts["row"], came["row"])
    flow = np.flatnonzero(put_of[timeline.flows.signal] >= 0)
    signal = timeline.flows.signal[flow]
    return Carried(flow, put_of[signal], _commands_of(timeline, put_of[signal]), came_of[signal])


def has_puts(lanes: Timeline) -> bool:
    """Whether proxies carried any. lanes: those of the engines of a run, with whatever else."""
    is_put = np.array([event.name.startswith("put_") for event in lanes.events], bool)
    return bool((is_put[lanes.spans.event] & lanes.tracks_of(TrackKind.ENGINE)[lanes.spans.track]).any())


def split_carried(timeline: Timeline) -> Timeline:
    """The timeline with two flows in place of each that a proxy carried: from the signal to the command, and from the
    put to the wait. For pictures."""
    carried = find_carried(timeline)
    if not len(carried):
        return timeline
    is_direct = np.ones(len(timeline.flows), bool)
    is_direct[carried.flow] = False
    direct, through = timeline.flows.take(is_direct), timeline.flows.take(carried.flow)
    asked = np.unique(np.stack([through.signal, carried.command])[:, carried.command >= 0], axis=1)
    signal = np.concatenate([direct.signal, asked[0], carried.put])
    wait = np.concatenate([direct.wait, asked[1], through.wait])
    order = np.lexsort((signal, wait))
    return timeline.replace(flows=Flows(signal[order], wait[order]))


def _asked_by(timeline: Timeline, channel: str, puts: Int64) -> tuple[Int64, Int64]:
    """([n] signals of a channel, [n] index into `puts` of what each asked for)"""
    signal, keys = _signals_on(timeline, channel), []
    for rows in (signal, puts):
        rank = timeline.track_ranks()[timeline.spans.track[rows]].astype(np.int64)
        keys.append([rank, *(values_of(timeline, rows, name) for name in ("peer", *_KEYS.get(channel, ())))])
    if channel in _KEYS:  # words have epochs of their own
        epochs = np.array([launch.epoch for launch in timeline.launches] + [0], np.int64)
        keys[0].append(epochs[timeline.spans.launch[signal]] % _EPOCHS)
        keys[1].append(values_of(timeline, puts, "epoch_bits"))
    asked = timeline.spans.start[signal] - _doubt_ns(timeline)[keys[0][0]]
    place = _match(_number(*keys), asked, timeline.spans.start[puts])
    return signal[place >= 0], place[place >= 0]


def _when_they_came(timeline: Timeline, name: str, puts: Int64) -> Int64:
    """[n] when the receivers came to puts; OPEN_END where that is not on record."""
    marks, ranks = timeline.marks, timeline.track_ranks().astype(np.int64)
    event = next((idx for idx, event in enumerate(timeline.events) if event.name == f"{name}_came"), -1)
    rows = np.flatnonzero(marks.event == event)
    if not len(rows):
        return np.full(len(puts), OPEN_END)
    fields = timeline.events[event].begin_fields
    shared = [field.name for field in fields if field.name in _WHOLE]
    came = [unpack_field(fields, "peer", marks.payload[rows]), ranks[marks.track[rows]]]
    came += [unpack_field(fields, field, marks.payload[rows]) for field in shared]
    put = [ranks[timeline.spans.track[puts]], *(values_of(timeline, puts, field) for field in ("peer", *shared))]
    doubt = _doubt_ns(timeline)
    place = _match(_number(put, came), timeline.spans.start[puts] - doubt[put[0]] - doubt[put[1]], marks.time[rows])
    return np.where(place >= 0, np.append(marks.time[rows], OPEN_END)[place], OPEN_END)


def _take_last_rows(timeline: Timeline, put_of: Int64, came_of: Int64, rows: Int64, came: Int64) -> None:
    """Puts the row in the place of the number of results that came after it, if any did.

    A row is of the number of its receiver, expert and call that is nearest in time: a call may have several combines.
    """
    signal = _signals_on(timeline, "results")
    signal = signal[put_of[signal] >= 0]
    fields = ("peer", *_KEYS["results"], "epoch_bits")
    ranks = timeline.track_ranks().astype(np.int64)
    keys = [
        [ranks[timeline.spans.track[some]], *(values_of(timeline, some, name) for name in fields)]
        for some in (rows, put_of[signal])
    ]
    nearest = _nearest(_number(*keys), timeline.spans.start[rows], timeline.spans.start[put_of[signal]])
    known = (nearest >= 0) & (came != OPEN_END)
    for row in np.flatnonzero(known)[np.argsort(came[known], kind="stable")].tolist():
        number = signal[nearest[row]]
        if came[row] > came_of[number]:
            put_of[number], came_of[number] = rows[row], came[row]


def _signals_on(timeline: Timeline, channel: str) -> Int64:
    """[n] spans of signals on a channel."""
    has_name = np.array(
        [event.channel is not None and event.channel.name == channel for event in timeline.events], bool
    )
    return np.flatnonzero((has_name & timeline.events_of(EventClass.SIGNAL))[timeline.spans.event])


def _spans_named(timeline: Timeline, name: str) -> Int64:
    """[n] spans of an event."""
    return np.flatnonzero(np.array([event.name == name for event in timeline.events], bool)[timeline.spans.event])


def _commands_of(timeline: Timeline, puts: Int64) -> Int64:
    """[n] the span of each put's command, which begins with it on its track; -1 where that is not on record."""
    spans, commands = timeline.spans, _spans_named(timeline, _COMMAND)
    key = _number(*([spans.track[rows].astype(np.int64), spans.start[rows]] for rows in (puts, commands)))
    order = np.argsort(key[1], kind="stable")
    place = np.searchsorted(key[1][order], key[0])
    is_there = np.append(key[1][order], -1)[place] == key[0]
    found: Int64 = np.where(is_there, np.append(commands[order], -1)[place], -1)
    return found


def _doubt_ns(timeline: Timeline) -> Int64:
    """[largest rank + 1] by how much times of a rank's host and of its kernels may contradict each other."""
    doubt = np.zeros(max((rank.rank for rank in timeline.ranks), default=0) + 1, np.int64)
    for rank in timeline.ranks:
        hard_ns = rank.clock.host_hard_ns + rank.clock.hard_ns if rank.clock else 0.0
        doubt[rank.rank] = _TICK_NS + int(min(np.nan_to_num(hard_ns, nan=_SECOND), _SECOND))
    return doubt


def _number(first: list[Int64], second: list[Int64]) -> tuple[Int64, Int64]:
    """Numbers for rows of two tables, equal where all of their columns are."""
    columns = np.stack([np.concatenate(pair) for pair in zip(first, second, strict=True)], axis=1)
    number = np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)
    return number[: len(first[0])], number[len(first[0]) :]


def _match(key: tuple[Int64, Int64], begun: Int64, ended: Int64) -> Int64:
    """[num_begun] index of what ended each; -1: nothing did. An end is of the last of its key that had begun, and of
    no other: what is not on record, on either side, takes nothing from the rest."""
    num_begun, num_ended = len(begun), len(ended)
    is_begun = np.arange(num_begun + num_ended) < num_begun
    order = np.lexsort((is_begun, -np.concatenate([begun, ended]), np.concatenate(key)))
    begins, ends = order[is_begun[order]], order[~is_begun[order]] - num_begun
    # From the last end on: of each the number of begins before it in this order, and one more for each end before it.
    first, turn = np.cumsum(is_begun[order])[~is_begun[order]], np.arange(num_ended)
    of_key = key[1][ends] * (num_begun + num_ended + 1)
    place = np.minimum(np.maximum.accumulate(first - turn + of_key) - of_key + turn, num_begun)
    begin = np.append(begins, -1)[place]
    is_of_key = (begin >= 0) & (np.append(key[0], -1)[begin] == key[1][ends])
    found = np.full(num_begun, -1)
    found[begin[is_of_key]] = ends[is_of_key]
    return found


def _nearest(key: tuple[Int64, Int64], time: Int64, other: Int64) -> Int64:
    """[n] index of what of the same key is nearest in time among others; -1: nothing is."""
    num_own, num_others = len(time), len(other)
    is_other = np.arange(num_own + num_others) >= num_own
    order = np.lexsort((np.concatenate([time, other]), np.concatenate(key)))
    by_key, in_turn = order[is_other[order]] - num_own, order[~is_other[order]]
    after = np.cumsum(is_other[order])[~is_other[order]]
    found, best = np.full(num_own, -1), np.full(num_own, np.iinfo(np.int64).max)
    for place in (after - 1, after):
        side = np.where((place >= 0) & (place < num_others), np.append(by_key, -1)[place], -1)
        of_side = (side >= 0) & (np.append(key[1], -1)[side] == key[0][in_turn])
        far = np.where(of_side, np.abs(np.append(other, 0)[side] - time[in_turn]), np.iinfo(np.int64).max)
        found[in_turn] = np.where(far < best[in_turn], side, found[in_turn])
        best[in_turn] = np.minimum(far, best[in_turn])
    return found
