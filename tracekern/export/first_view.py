"""The part of a large Drawing that a browser loads in seconds: some blocks whole, all lanes, arrows of long waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracekern.export.drawing import Drawing
from tracekern.export.first_waits import first_waits
from tracekern.export.labels import describe_releasers
from tracekern.formatting import count
from tracekern.timeline.model import EventClass, Int64, Mask, TrackKind
from tracekern.timeline.select import take_spans

_LONGEST = 20
"""So many of the longest waits have their blocks drawn, and those of the signals that ended them."""
_NAMED = 3


def first_view(drawing: Drawing, max_spans: int, sought: Sequence[int] = ()) -> Drawing:
    """The drawing with at most `max_spans` spans and marks: of every k-th block of all ranks, the smallest k that fits.

    Up to half of them are of the blocks of the longest waits, and then of those of the tracks `sought`, which are on
    the critical path, the most important ones first. Where a single block of each rank is larger than that, all blocks
    are drawn near to the longest wait. `part` of the result says what is drawn.
    """
    timeline = drawing.timeline
    total = len(timeline.spans) + len(timeline.marks)
    if total <= max_spans:
        return drawing
    first = _with_signals(drawing, first_waits(drawing).indices)
    longest = _with_signals(drawing, _longest_waits(drawing))
    blocks = _Blocks.of(drawing)
    wanted = [*timeline.spans.track[first].tolist(), *timeline.spans.track[longest].tolist(), *sought]
    chosen, says = blocks.choose(wanted, len(first), max_spans, "or on the critical path" if sought else "")
    kept = np.append(blocks.of_track, -1)[np.concatenate([timeline.spans.track, timeline.marks.track])]
    kept = np.append(chosen, True)[kept]
    if kept.sum() > max_spans:
        kept = _nearest(drawing, kept, first, max_spans)
        says += ", of these what is nearest in time to the longest wait"
    part = f"{says}: {kept.sum():,} of {count(total, 'span')}"
    return _take(drawing, kept[: len(timeline.spans)], kept[len(timeline.spans) :], part)


def limit_flows(drawing: Drawing, max_flows: int) -> Drawing:
    """The drawing with at most `max_flows` arrows, those of the longest waits."""
    if int(drawing.flow_drawable.sum()) <= max_flows:
        return drawing
    return replace(drawing, flow_drawn=drawing.flow_drawable & _of_longest_waits(drawing, max_flows))


@dataclass(frozen=True)
class _Blocks:
    """[n] columns, a block of a stream and rank each."""

    number: Int64
    """Place of its number among those of all ranks."""
    size: Int64
    """Spans and marks."""
    of_track: Int64
    """[num_tracks] -1 for tracks of no kernel."""
    names: Int64
    """The numbers themselves."""
    size_of_rest: int
    """Spans and marks on other tracks."""

    @classmethod
    def of(cls, drawing: Drawing) -> _Blocks:
        timeline = drawing.timeline
        is_device = timeline.tracks_of(TrackKind.DEVICE)
        own = [track for track in timeline.tracks if track.kind is TrackKind.DEVICE]
        keys = np.array([(track.block, track.rank, track.stream) for track in own], np.int64).reshape(-1, 3)
        found, which = np.unique(keys, axis=0, return_inverse=True)
        of_track = np.full(len(timeline.tracks), -1, np.int64)
        of_track[is_device] = which.ravel()
        names, number = np.unique(found[:, 0], return_inverse=True)
        on_track = np.bincount(np.append(timeline.spans.track, timeline.marks.track), minlength=len(of_track))
        size = np.zeros(len(found), np.int64)
        np.add.at(size, of_track[is_device], on_track[is_device])
        return cls(number, size, of_track, names, int(on_track[~is_device].sum()))

    def choose(self, wanted: Sequence[int], num_first: int, max_spans: int, or_else: str) -> tuple[Mask, str]:
        """The blocks to draw and words for them. wanted: tracks, the first `num_first` whatever their blocks hold.

        or_else: what is wanted of them beside the longest waits, in words.
        """
        room = max_spans - self.size_of_rest
        chosen, tried = np.zeros((2, len(self.size)), bool)
        for place, block in enumerate(self.of_track[list(wanted)].tolist()):
            if block < 0 or tried[block]:
                continue
            tried[block] = True
            chosen[block] = place < num_first or self.size[chosen].sum() + self.size[block] <= room / 2
        least = max(1, int(self.size.sum()) // max(room, 1))
        steps = range(min(least, len(self.names)), len(self.names) + 1)
        step = next((one for one in steps if self._with_each(chosen, one) <= room), 0)
        if not step:
            return np.ones(len(self.size), bool), "all blocks"
        each = self.number % step == 0
        names = self.names[::step]
        says = f"{'block' if len(names) == 1 else 'blocks'} {', '.join(map(str, names[:_NAMED].tolist()))}"
        says += f"{' ...' if len(names) > _NAMED else ''} of {len(self.names):,}"
        if (tried & ~each).any():
            of_all = f"{(chosen & ~each).sum():,} of {(tried & ~each).sum():,}"
            says += f", and {of_all} others with the longest waits {or_else}".rstrip()
        return chosen | each, says

    def _with_each(self, chosen: Mask, step: int) -> int:
        return int(self.size[chosen | (self.number % step == 0)].sum())


def _longest_waits(drawing: Drawing) -> list[int]:
    """Those that signals of other ranks ended, the longest first."""
    timeline = drawing.timeline
    is_wait = timeline.events_of(EventClass.WAIT)[timeline.spans.event]
    rank = timeline.track_ranks()[timeline.spans.track]
    waits = np.flatnonzero(is_wait & (drawing.releaser >= 0))
    waits = waits[rank[waits] != rank[drawing.releaser[waits]]]
    wait_ns = drawing.draw_end[waits] - timeline.spans.start[waits]
    return [int(wait) for wait in waits[np.lexsort((-wait_ns, drawing.in_start_up[waits]))[:_LONGEST]]]


def _with_signals(drawing: Drawing, waits: Sequence[int]) -> list[int]:
    """The waits, and behind each the signal that ended it, if any did."""
    return [span for wait in waits for span in (wait, int(drawing.releaser[wait])) if span >= 0]


def _nearest(drawing: Drawing, kept: Mask, first: Sequence[int], max_spans: int) -> Mask:
    """Picks the spans `first`, and of `kept`, spans and marks, those nearest to the ends of the waits in `first`.

    All others than those of kernels are kept, where they leave half of the room.
    """
    timeline = drawing.timeline
    start = np.concatenate([timeline.spans.start, timeline.marks.time])
    end = np.concatenate([drawing.draw_end, timeline.marks.time])
    is_wait = timeline.events_of(EventClass.WAIT)[timeline.spans.event[list(first)]]
    moments = [int(drawing.draw_end[span]) for span, waits in zip(first, is_wait, strict=True) if waits]
    away = np.min([np.maximum(0, np.maximum(start - at, at - end)) for at in moments or [drawing.first_ns]], axis=0)
    away[list(first)] = -2
    is_device = timeline.tracks_of(TrackKind.DEVICE)[np.concatenate([timeline.spans.track, timeline.marks.track])]
    if (kept & ~is_device).sum() <= max_spans // 2:
        away[~is_device] = -1
    which = np.flatnonzero(kept)
    nearest = np.zeros_like(kept)
    nearest[which[np.argsort(away[which], kind="stable")[:max_spans]]] = True
    return nearest


def _take(drawing: Drawing, spans: Mask, marks: Mask, part: str) -> Drawing:
    """What the masks pick. Waits keep the words for what ended them, also where that is not drawn."""
    timeline = take_spans(drawing.timeline, spans)
    timeline = timeline.replace(marks=timeline.marks.take(marks))
    flows = spans[drawing.timeline.flows.signal] & spans[drawing.timeline.flows.wait]
    new_index = np.append(np.where(spans, np.cumsum(spans) - 1, -1), -1)
    texts, which = describe_releasers(drawing)
    return replace(
        drawing,
        timeline=timeline,
        draw_end=drawing.draw_end[spans],
        flow_drawable=drawing.flow_drawable[flows],
        flow_drawn=drawing.flow_drawn[flows],
        flow_early=drawing.flow_early[flows],
        releaser=new_index[drawing.releaser[spans]],
        released_by=(texts, which[spans]),
        part=part,
    )


def _of_longest_waits(drawing: Drawing, max_flows: int) -> Mask:
    """[num_flows] False for flows of the shorter waits, beyond `max_flows`.

    Those that a reader sees first come first. Waits for other ranks come before those within a rank, however long.
    """
    timeline, drawable = drawing.timeline, drawing.flow_drawable
    signal, wait = timeline.flows.signal, timeline.flows.wait
    wait_ns = np.where(drawable, drawing.draw_end[wait] - timeline.spans.start[wait], -1)
    rank_of_track, track = timeline.track_ranks(), timeline.spans.track
    is_local = rank_of_track[track[signal]] == rank_of_track[track[wait]]
    is_first = np.isin(wait, first_waits(drawing).indices)
    kept = np.ones(len(drawable), bool)
    kept[np.lexsort((-wait_ns, is_local | ~drawable, ~is_first))[max_flows:]] = False
    return kept
