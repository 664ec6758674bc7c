"""What a track did at each nanosecond, against a stack."""

from __future__ import annotations

from hypothesis import given
from timelines import COPY, LAUNCH, WAIT, make_launch, make_spans, make_timeline, make_tracks
from wait_oracle import any_runs

from tracekern.analysis.graph.activity import flatten
from tracekern.timeline.model import OPEN_END, Flows, Timeline, TrackKind


def innermost_by_hand(timeline: Timeline, track: int) -> tuple[dict[int, int], list[int]]:
    """(ns -> the innermost span of the track, the spans of no length that lie in no other one)."""
    spans, innermost, alone = timeline.spans, {}, []
    open_spans: list[int] = []  # their ends, each within that of the one before it
    latest_end = 0
    for span in range(len(spans)):
        start, end = int(spans.start[span]), int(spans.end[span])
        if spans.track[span] != track or end == OPEN_END:
            continue
        while open_spans and open_spans[-1] <= start:
            open_spans.pop()
        if start == end:
            alone += [span] if start >= latest_end else []
            continue
        latest_end = max(latest_end, end)
        open_spans.append(min([end, *open_spans[-1:]]))
        innermost.update(dict.fromkeys(range(start, open_spans[-1]), span))
    return innermost, alone


@given(any_runs())
def test_pieces_are_the_innermost_spans(timeline: Timeline):
    activity = flatten(timeline)
    pieces = list(zip(*(column.tolist() for column in vars(activity).values()), strict=True))
    assert [piece[1:3] for piece in pieces] == sorted(piece[1:3] for piece in pieces)
    for track in range(len(timeline.tracks)):
        innermost, alone = innermost_by_hand(timeline, track)
        mine = [(span, start, end) for span, of, start, end in pieces if of == track]
        assert all(end <= after for (_, _, end), (_, after, _) in zip(mine, mine[1:], strict=False))
        found = {time: span for span, start, end in mine for time in range(start, end)}
        assert found == innermost
        assert [span for span, start, end in mine if start == end] == alone


def test_what_follows_a_wait_without_an_end_keeps_its_time():
    """A loop whose body leaves a wait open: each of these would last until the kernel ends."""
    lane, writer = (
        next(number for number, track in enumerate(make_tracks(1)) if track.kind == kind)
        for kind in (TrackKind.LAUNCH, TrackKind.DEVICE)
    )
    rows = [(lane, LAUNCH, 0, 0, 10_000, 0, 0)]
    for start in range(0, 3000, 1000):
        rows += [(writer, COPY, 0, start, start + 900, 0, 0), (writer, WAIT, 0, start + 200, OPEN_END, 0, 0)]
    timeline = make_timeline(1, launches=(make_launch(0),), spans=make_spans(rows), flows=Flows())
    activity = flatten(timeline)
    event = timeline.spans.event[activity.span]
    assert list(zip(event.tolist(), activity.start.tolist(), activity.end.tolist(), strict=True)) == [
        piece
        for start in range(0, 3000, 1000)
        for piece in ((COPY, start, start + 200), (WAIT, start + 200, start + 900))
    ]
