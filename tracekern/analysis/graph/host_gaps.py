"""How much of the gap before a kernel was its host's: only what a host lane, or the launch itself, says.

A gap on a stream has two possible reasons: the host had not launched the kernel yet, or a kernel that was not recorded
ran there. Three things prove the host's part:

- the launch: the host asked for its descriptor at a known time, and launched the kernel after that;
- a lane of the host's ranges that has one range for each launch of the kernel: the n-th range made the n-th launch;
- torch.profiler's lanes of the rank's streams, which show every kernel: where all of them are idle, none ran, and
  where one did run, the host need not have been late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tracekern.timeline.clocks.host_times import apply_host
from tracekern.timeline.facts.stages import stages_of
from tracekern.timeline.intervals import unions
from tracekern.timeline.join.host_lanes import is_stream_lane, is_torch_lane
from tracekern.timeline.model import ClockFit, Int32, Int64, Mask, Timeline, TrackKind

MAX_LAUNCH_NS = 10_000
"""No gap ends before its kernel was launched and began, which takes some us: a rest below that is the launch itself."""
MAX_DOUBT_NS = 1e9
"""A host clock that may be off by more proves nothing of a gap."""
NEVER = np.iinfo(np.int64).min
"""Stands for a time that is not on record."""
_LATE = np.iinfo(np.int64).max


def asked_times(timeline: Timeline, start: Int64) -> Int64:
    """[num_launches] when its host asked for each launch, or entered the range in which it made it, in ns from the
    origin; NEVER where no clock or lane of the host says so.

    start: [num_launches] when each began.
    """
    found, stage = np.full(len(timeline.launches), NEVER), stages_of(timeline).of_launch
    lanes = _host_lanes(timeline)
    for rank, clock, mine in _known_hosts(timeline, start):
        doubt = int(np.ceil(clock.host_hard_ns))
        asked = _asked(timeline, mine)
        begun = np.where(asked > 0, apply_host(clock, asked) - timeline.origin_ns, NEVER)
        begun = np.where(begun <= start[mine] + doubt, begun, NEVER)  # of another clock
        found[mine] = np.maximum(
            begun, _ranges_begun(timeline, lanes.get(rank, []), rank, stage, mine, start[mine] + doubt)
        )
    return found


def host_gaps(timeline: Timeline, gap_start: Int64, start: Int64, asked: Int64) -> Int64:
    """[num_launches] ns, at least, of each gap [gap_start, start) before a launch in which its host had not launched it
    yet.

    asked: asked_times(). 0 where nothing says more: host clocks that are not related to the axis prove nothing.
    """
    least, most = np.zeros(len(timeline.launches), np.int64), np.maximum(start - gap_start, 0)
    lanes = _host_lanes(timeline)
    for rank, clock, known in _known_hosts(timeline, start):
        mine = known[start[known] > gap_start[known]]
        doubt = int(np.ceil(clock.host_hard_ns))
        by_calls = np.maximum(asked[mine], gap_start[mine] + doubt) - doubt - gap_start[mine]
        busy, seen = _busy_ns(timeline, lanes.get(rank, []), gap_start[mine], start[mine])
        most[mine] -= busy
        of_host = np.maximum(by_calls, np.where(seen, most[mine], 0))
        least[mine] = np.where((of_host > 0) & (of_host >= most[mine] - MAX_LAUNCH_NS), most[mine], of_host)
    return least


def _known_hosts(timeline: Timeline, start: Int64) -> Iterator[tuple[int, ClockFit, Int64]]:
    """(rank, its clock, its launches that began) of ranks whose host's clock is related to the axis."""
    rank_of_launch = np.array([launch.rank for launch in timeline.launches], np.int64)
    for entry in timeline.ranks:
        clock = entry.clock
        if clock is not None and clock.host_anchor_ns and clock.host_hard_ns <= MAX_DOUBT_NS:
            yield entry.rank, clock, np.flatnonzero((rank_of_launch == entry.rank) & (start < _LATE))


def _asked(timeline: Timeline, launches: Int64) -> Int64:
    return np.array([timeline.launches[idx].host_ns for idx in launches.tolist()], np.int64)


def _host_lanes(timeline: Timeline) -> dict[int, list[int]]:
    """Rank -> tracks of its host."""
    found: dict[int, list[int]] = {}
    for track in np.flatnonzero(timeline.tracks_of(TrackKind.HOST)).tolist():
        found.setdefault(timeline.tracks[track].rank, []).append(track)
    return found


def _ranges_begun(
    timeline: Timeline, lanes: Sequence[int], rank: int, stage: Int32, launches: Int64, latest: Int64
) -> Int64:
    """[n] when the host entered the range in which it made each launch; NEVER where no lane has a range for each.

    lanes: of the rank. stage: [num_launches]. latest: [n] when it had at the latest. Of several lanes or names, the
    first to begin.
    """
    spans, begun = timeline.spans, np.full(len(launches), NEVER)
    series = []
    for track in lanes:
        if is_torch_lane(timeline.tracks[track]):
            continue
        rows = np.flatnonzero(spans.track == track)
        series += [np.sort(spans.start[rows[label]]) for label in _by_label(spans.begin_payload[rows])]
    rank_of_launch = np.array([launch.rank for launch in timeline.launches], np.int64)
    counts = np.bincount(stage[rank_of_launch == rank])
    sequence = np.array([timeline.launches[idx].sequence for idx in launches.tolist()], np.int64)
    for number in np.unique(stage[launches]).tolist():
        here, count = np.flatnonzero(stage[launches] == number), counts[number]
        fitting = [
            starts[sequence[here]]
            for starts in series
            if len(starts) == count > sequence[here].max() and (starts[sequence[here]] <= latest[here]).all()
        ]
        if fitting:
            begun[here] = np.min(fitting, axis=0)
    return begun


def _by_label(labels: np.ndarray) -> list[Int64]:
    """The rows of each label."""
    number = np.unique(labels, return_inverse=True)[1]
    return [np.flatnonzero(number == label) for label in range(int(number.max(initial=-1)) + 1)]


def _busy_ns(timeline: Timeline, lanes: Sequence[int], gap_start: Int64, gap_end: Int64) -> tuple[Int64, Mask]:
    """([n] ns of each gap in which the profiler shows a kernel that began and ended there, on any stream of the rank,
    [n] whether it looked at all of the gap)"""
    spans = timeline.spans
    lanes = [idx for idx in lanes if is_torch_lane(timeline.tracks[idx])]
    row = np.flatnonzero(np.isin(spans.track, [idx for idx in lanes if is_stream_lane(timeline.tracks[idx])]))
    if not len(row):
        return np.zeros(len(gap_start), np.int64), np.zeros(len(gap_start), bool)
    every = np.flatnonzero(np.isin(spans.track, lanes))
    seen = (gap_start >= spans.start[every].min()) & (gap_end <= spans.end[every].max())
    # An annotation is drawn around the kernels that it names: the innermost spans are what ran.
    following = np.append(spans.track[row][1:] == spans.track[row][:-1], False)
    row = row[~(following & (np.append(spans.start[row][1:], 0) < spans.end[row]))]
    row = row[np.argsort(spans.start[row], kind="stable")]
    begin, end = spans.start[row], spans.end[row]
    busy = np.zeros(len(gap_start), np.int64)
    for idx in range(len(gap_start)):
        first, stop = np.searchsorted(begin, (gap_start[idx], gap_end[idx])).tolist()
        inside = first + np.flatnonzero(end[first:stop] <= gap_end[idx])  # the kernel itself ends behind the gap
        joined, until = unions(np.zeros(len(inside), np.int32), begin[inside], end[inside])
        busy[idx] = (until - begin[inside[joined]]).sum()
    return np.where(seen, busy, 0), seen
