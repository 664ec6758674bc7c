"""The Timeline: what every stage right of the recorder works on. Columns, no bits, no GPUs.

Spans, marks and flows are numpy columns; tracks, events, launches and ranks are short tuples they point into. A
Timeline is never changed: a stage returns a new one.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.event_table import Members
from tracekern.dump.format import ALIGN
from tracekern.errors import BadInput
from tracekern.formatting import brief, count, duration, number_ranges, printable, ranks, similar
from tracekern.timeline.table import Table, shared_column

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt64 = npt.NDArray[np.uint64]
Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

OPEN_END = np.int64(-1)
"""`end` of a span that never closed: its kernel hung or was killed."""


class EventClass(enum.Enum):
    """What kind of thing an event is. HOST and LAUNCH are spans of the host and of whole kernels."""

    WORK = "work"
    WAIT = "wait"
    SIGNAL = "signal"
    SYNC = "sync"
    HOST = "host"
    LAUNCH = "launch"


class TrackKind(enum.IntEnum):
    """Who wrote a track."""

    DEVICE = 0
    """One writer of a kernel: a warp or role of a block."""
    LAUNCH = 1
    """The kernels of one stream of a rank, one span each."""
    HOST = 2
    """A thread of the host process: Python ranges, torch.profiler."""
    ENGINE = 3
    """Transfers, writes or waits of a transfer engine that did not overlap."""


class ChannelKind(enum.Enum):
    """How signals join waits: DATA one to one, CREDIT and COUNT at least so many, BARRIER N to one.

    COUNT is of what a sender has sent, CREDIT of the room that a receiver has made. At a GROUP or a GRID, warps of a
    block or of a launch meet, without a signal. IMMEDIATE is of writes that are counted where they arrive, in whatever
    order.
    """

    DATA = "data"
    CREDIT = "credit"
    COUNT = "count"
    BARRIER = "barrier"
    GROUP = "group"
    GRID = "grid"
    IMMEDIATE = "immediate"

    @property
    def has_levels(self) -> bool:
        """Whether signals have a value, and waits want one of at least so much."""
        return self in (ChannelKind.CREDIT, ChannelKind.COUNT)

    @property
    def is_local(self) -> bool:
        """Whether warps of one launch meet there, and nobody signals."""
        return self in (ChannelKind.GROUP, ChannelKind.GRID)

    @property
    def has_pairs(self) -> bool:
        """Whether the fields of a signal and a wait say that they belong together."""
        return not self.is_local and self is not ChannelKind.IMMEDIATE


@dataclass(frozen=True)
class Field:
    """A number that spans of an event carry, packed into their payload."""

    name: str
    bits: int
    signed: bool = False


@dataclass(frozen=True)
class Channel:
    """What joins the signals of one event to the waits of another."""

    name: str
    kind: ChannelKind
    key: tuple[str, ...]
    """Fields that identify a message, together with the two ranks and the epoch."""
    initial: int = 0
    """Level of a channel before any signal, if its kind has levels. A wait that wants no more waits for nobody."""
    tail: str = ""
    """Channel of kind COUNT, with the same key, that says what the ring of this CREDIT holds; "" for none."""


@dataclass(frozen=True)
class EventType:
    """One row of a kernel's event table (csrc/trace/events.h)."""

    name: str
    event_class: EventClass
    ends_at: str  # "issue" | "completion"
    channel: Channel | None = None
    begin_fields: tuple[Field, ...] = ()
    end_fields: tuple[Field, ...] = ()
    is_headless: bool = False
    """Whether a flight recorder overwrote the begin of these spans. They start at the oldest record of their track."""
    bytes_each: int = 0
    """Bytes that a span moves or announces; 0: not known."""
    bytes_of: str = ""
    """Field that says how many times as many; "" for once."""

    def has(self, field_name: str) -> bool:
        """Whether it has a begin field of that name."""
        return any(field.name == field_name for field in self.begin_fields)


@dataclass(frozen=True)
class Track:
    """The spans of one writer: a warp, a stream or a host thread of a rank. Launches on one stream share its tracks."""

    rank: int
    kind: TrackKind
    name: str
    stream: int = 0
    block: int = -1
    warp: int = -1
    sm: int = -1
    role: str = ""
    """Where launches gave the warp several roles, all of them, that of the first kernel first: "send/receive"."""
    kernel_roles: tuple[tuple[str, str], ...] = ()
    """(kernel, role) where kernels gave it different roles or none, see `roles_of()`; else empty."""
    group: int = -1
    """The warp's group in its block; -1 where warps do not work in groups."""
    sub_warp: int = -1
    """The warp within its group."""


@dataclass(frozen=True)
class Launch:
    """One run of a kernel on a rank."""

    rank: int
    launch_idx: int
    name: str
    sequence: int
    stream: int
    epoch: int
    num_blocks: int
    warps_per_block: int
    num_tracks: int
    records_per_track: int
    records_lost: int
    records_needed: int
    """The records_per_track that would have lost nothing."""
    shared_tracks: int = 0
    """Tracks that a second recorder of the warp, or a second launch, wrote to as well."""
    blocks_run: int = 0
    """Number of blocks that ran where it was more than num_blocks, else 0."""
    records_overwritten: int = 0
    """Older records that a flight recorder overwrote."""
    host_ns: int = 0
    """Host time when its host asked for the launch, before the kernel was launched; 0: not known."""
    waited_ns: int = 0
    """How long its host waited before that for the recorder to make room."""
    key: str = ""
    """What the program calls it: `launch(..., key="layer 3")`."""
    stamp_error_ns: float = 0.0
    """How far times from the cycle counter may be off the rank's clock, if the core clock kept its rate during each
    track; inf where a track never ended. 0 for times of the realtime clock."""
    groups: int = 0
    """Warp groups of a block; 0 where warps do not work in groups."""
    group_field: str = ""
    """What the number of a group in the grid is called."""
    members: Members | None = None
    """The ranks of its communicator; None for all of the run."""

    @property
    def is_align(self) -> bool:
        """Whether ranks wait for each other in it by intention. What lies before its end counts for nothing."""
        return self.name == ALIGN


@dataclass(frozen=True)
class ClockStep:
    """What a clock did between two rounds of samples, where it did not go on as before and after."""

    begin_ns: int
    end_ns: int
    """Axis ns of the two rounds."""
    jump_ns: float
    """It jumped by up to so much, or its rate changed at once to the same effect."""


@dataclass(frozen=True)
class ClockFit:
    """How a rank's ticks are mapped to ns on the common axis, and how far that can be trusted."""

    method: str
    """ "reference", "ping-pong", "hosts" or "unaligned"."""
    hard_ns: float
    """Proven by round trips and flows: the true time is within +-hard_ns."""
    sigma_ns: float
    """Standard deviation of the estimate, if both ways of a round trip take equally long."""
    anchor_ticks: tuple[int, ...] = ()
    anchor_ns: tuple[int, ...] = ()
    """Piecewise linear map ticks -> axis ns through these anchors, at least two; extended with the slope of the outer
    pieces. Integers: at 1e18 ns a float is 128 ns coarse."""
    host_anchor_ns: tuple[int, ...] = ()
    host_axis_ns: tuple[int, ...] = ()
    """The same map for the time of the rank's host; empty where nothing relates it to the axis."""
    host_hard_ns: float = float("nan")
    """Proven bound of that map where the host's ranks have events."""
    rate_error: float = 0.0
    """Proven bound of the map's slope, in ns per ns."""
    round_trip_ns: float | None = None
    """The bound from round trips alone, where flows tightened hard_ns; else None."""
    wander_ns: float = 0.0
    """Part of hard_ns: what rates may do between rounds and beyond them."""
    doubt_ns: float = 0.0
    """Part of hard_ns: what rounds or flows contradict of a steady clock and of ways that are equally fast in both
    directions. Likely errors are that much larger, too."""
    steps: tuple[ClockStep, ...] = ()
    is_checked: bool = True
    """Later rounds would show a jump of hard_ns, or flows an error of twice that. Without them the clock is assumed not
    to jump, and its rate to change by at most MAX_WANDER_PER_NS."""

    __repr__ = brief


@dataclass(frozen=True)
class Rank:
    """One rank of the run."""

    rank: int
    node: str
    """Equal for ranks of one node and for no others. Made of the host name, metadata["node"]: see join/nodes.py."""
    device: str
    backend: str
    state: str  # "closed" | "salvaged" | "running" when this was taken
    ticks_per_second: float
    resolution_ticks: int
    clock: ClockFit | None = None
    metadata: dict[str, Any] = field(default_factory=dict, repr=False)
    """All metadata of the dump."""
    label: str = ""
    """Name in pictures; empty for "rank N"."""
    died_ns: int | None = None
    """Axis ns when it died; None if it closed its capture, or the time is not known."""
    clock_id: str = ""
    """Equal for ranks that read the same physical clock, such as that of a GPU which they share; "" if not known."""

    @property
    def machine(self) -> str:
        """Equal for ranks of one machine, which share its time, whatever their containers call it."""
        return str(self.metadata.get("machine") or self.metadata.get("node", self.node))

    @property
    def resolution_ns(self) -> float:
        """Length of a tick of its clock."""
        return self.resolution_ticks * 1e9 / self.ticks_per_second


def clocks_of_ranks(ranks: Iterable[Rank]) -> Int32:
    """[largest rank + 2] the clock that each rank reads, called after the lowest rank that reads it.

    -1 for numbers that no rank has; the last entry is for rank -1.
    """
    by_rank = sorted(ranks, key=lambda rank: rank.rank)
    clocks = np.full(by_rank[-1].rank + 2 if by_rank else 1, -1, np.int32)
    lowest: dict[tuple[str, float], int] = {}
    for rank in by_rank:
        # A map from ticks is shared only where ticks are equally long.
        clock = lowest.setdefault((rank.clock_id, rank.ticks_per_second), rank.rank)
        clocks[rank.rank] = clock if rank.clock_id else rank.rank
    return clocks


def shared_gpus(ranks: Iterable[Rank]) -> list[list[int]]:
    """Returns the ranks of each GPU that several of them share."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.clock_id and rank.backend != "cpu":
            found.setdefault(rank.clock_id, []).append(rank.rank)
    return [numbers for numbers in found.values() if len(numbers) > 1]


ABSENT_KINDS = ("missing_rank", "left_out_rank", "outside_rank")
"""Kinds of problems about ranks that are not in the timeline: without a dump, not selected, or not of the group that
captured although its kernels may have waited for them."""

CONTRADICTION_KINDS = ("backwards_flow", "contradicting_flows")
"""Kinds of problems about waits that ended before what they waited for: the events or the common axis are wrong."""

LOSS_KINDS = (
    *("lost_records", "torn_track", "orphan_end", "surplus_warps", "surplus_blocks", "shared_tracks"),
    *("launch_not_recorded", "lacking_body", "launch_lost", "lost_host_spans", "lost_clock_samples", "missing_rank"),
    "damaged_times",
)
"""Problems of data that should be there and is not. Not "salvaged", "running" or "open_span": what a rank had recorded
when it died or was looked at is there, and what never arrived is a torn track or a lost launch."""


UNCOUNTED_LOSS_KINDS = (
    *("torn_track", "orphan_end", "surplus_warps", "surplus_blocks", "shared_tracks", "launch_not_recorded"),
    "launch_lost",
)
"""Those of them after which nobody knows how many records of a rank are missing, or wrong."""


@dataclass(frozen=True)
class Problem:
    """Something that a reader of the timeline should know: a loss, a torn track, an unpaired record."""

    severity: str  # "note": as was asked for; "warning": the rest is right; "error": data is missing or doubtful
    kind: str  # "lost_records" | "open_span" | "orphan_end" | "torn_track" | "unmatched_wait" | "backwards_flow" | ...
    rank: int
    track: int  # index into Timeline.tracks, -1: none
    text: str
    count: int = 1


def count_problems(problems: Iterable[Problem]) -> dict[str, int]:
    """How often each kind was met. Lost records count once: launches report them, and their tracks again."""
    counts: dict[str, int] = {}
    of_tracks = 0
    for problem in problems:
        counts[problem.kind] = counts.get(problem.kind, 0) + problem.count
        of_tracks += problem.count if problem.kind == "lost_records" and problem.track >= 0 else 0
    if of_tracks:
        counts["lost_records"] = max(of_tracks, counts["lost_records"] - of_tracks)
    return counts


def told_once(problems: Iterable[Problem]) -> list[Problem]:
    """Problems that differ in numbers alone, as those of many ranks do, as the first of them, which names the others.

    Faults stay apart: who gave up on whom is in the numbers.
    """
    alike: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        text = problem.text if problem.kind == "fault" else _without_numbers(problem.text)
        alike.setdefault((problem.severity, problem.kind, text), []).append(problem)
    return [_first_of(same) if len(same) > 1 else same[0] for same in alike.values()]


def _without_numbers(text: str) -> str:
    """The text without numbers and their units, and without the endings of many."""
    return re.sub(r"\d[\d,.]*(?: [num]?s\b)?|(?<=ch)es\b|s\b", "", text)


def _first_of(alike: list[Problem]) -> Problem:
    first = alike[0]
    others = sorted({problem.rank for problem in alike} - {first.rank})
    where = f", of {'rank' if len(others) == 1 else 'ranks'} {number_ranges(others)}" if others else ""
    text = f"{first.text} (and {len(alike) - 1:,} more like this{where})"
    return dataclasses.replace(first, text=text, count=sum(problem.count for problem in alike))


def _empty(dtype: Any) -> Any:
    return np.empty(0, dtype)


@dataclass(frozen=True, repr=False)
class Spans(Table):
    """[n] columns, sorted by (track, start, -end): parents before children.

    `end` is OPEN_END for a span that never closed.
    """

    track: Int32 = field(default_factory=lambda: _empty(np.int32))
    event: Int32 = field(default_factory=lambda: _empty(np.int32))
    launch: Int32 = field(default_factory=lambda: _empty(np.int32))
    start: Int64 = field(default_factory=lambda: _empty(np.int64))
    end: Int64 = field(default_factory=lambda: _empty(np.int64))
    begin_payload: UInt64 = field(default_factory=lambda: _empty(np.uint64))
    end_payload: UInt64 = field(default_factory=lambda: _empty(np.uint64))

    @property
    def is_open(self) -> Mask:
        """[n] True for spans that never closed."""
        mask: Mask = self.end == OPEN_END
        return mask


@dataclass(frozen=True, repr=False)
class Marks(Table):
    """[n] columns of instants, sorted by (track, time)."""

    track: Int32 = field(default_factory=lambda: _empty(np.int32))
    event: Int32 = field(default_factory=lambda: _empty(np.int32))
    launch: Int32 = field(default_factory=lambda: _empty(np.int32))
    time: Int64 = field(default_factory=lambda: _empty(np.int64))
    payload: UInt64 = field(default_factory=lambda: _empty(np.uint64))


@dataclass(frozen=True, repr=False)
class Flows(Table):
    """[n] edges from a signal span to the wait span it released: indices into Timeline.spans."""

    signal: Int64 = field(default_factory=lambda: _empty(np.int64))
    wait: Int64 = field(default_factory=lambda: _empty(np.int64))


@dataclass(frozen=True)
class Timeline:
    """A capture in memory: what happened on all ranks. Made by `tracekern.load()`."""

    unit: str  # "ticks" (each rank on its own clock) | "ns" (one axis, clock of the reference rank)
    ranks: tuple[Rank, ...]
    tracks: tuple[Track, ...]
    events: tuple[EventType, ...]
    launches: tuple[Launch, ...]
    spans: Spans = field(default_factory=Spans)
    marks: Marks = field(default_factory=Marks)
    flows: Flows = field(default_factory=Flows)
    host_names: tuple[str, ...] = ()
    """Names of host spans: for an event of class HOST, begin_payload indexes this tuple."""
    problems: tuple[Problem, ...] = ()
    origin_ns: int = 0
    """Axis ns of time 0: `start`, `end` and `time` count from here (unit "ns")."""
    title: str = ""
    aligned: bool = True

    def __repr__(self) -> str:
        kinds = sorted({(rank.device, rank.backend) for rank in self.ranks})
        devices = [printable(f"{device} ({backend})") for device, backend in kinds[:3]]
        names = [printable(self.events[idx].name) for idx in np.unique(self.spans.event).tolist()]
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        problems = ", ".join(f"{kind} {number:,}" for kind, number in count_problems(self.problems).items())
        lines = [
            ", ".join([f"Timeline: {count(len(self.ranks), 'rank')}", *devices, self._length()]),
            *([printable(self.title)] if self.title else ()),
            f"{count(len(self.spans), 'span')}, {count(len(self.marks), 'mark')} and {count(len(self.flows), 'flow')} "
            f"in {count(len(self.launches), 'launch')}, on {count(len(self.tracks), 'track')}",
            *([f"events: {', '.join(names[:12])}{more}"] if names else ()),
            self._clocks(),
            *([f"problems: {problems}"] if problems else ()),
        ]
        return "\n  ".join(lines)

    def _length(self) -> str:
        spans, times = self.spans, self.marks.time
        if not (len(spans) or len(times)):
            return "nothing recorded"
        starts, ends = np.concatenate([spans.start, times]), np.concatenate([spans.end, spans.start, times])
        length = int(ends.max()) - int(starts.min())
        return duration(length) if self.unit == "ns" else f"{length:,} ticks"

    def _clocks(self) -> str:
        clocks = [rank.clock for rank in self.ranks if rank.clock]
        if self.unit != "ns" or not self.has_one_axis or not clocks:
            return "every rank on its own clock: times of different ranks cannot be compared"
        hard, sigma = (max(getattr(clock, name) for clock in clocks) for name in ("hard_ns", "sigma_ns"))
        return f"clocks within ±{duration(hard)} proven, ±{duration(sigma)} repeatable"

    def replace(self, **changes: Any) -> Timeline:
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def without_rows(self) -> Timeline:
        """Returns its tables alone."""
        return self.replace(spans=Spans(), marks=Marks(), flows=Flows())

    @property
    def has_one_axis(self) -> bool:
        """Whether times of all ranks can be compared."""
        return self.aligned or len(self.ranks) <= 1

    def track_ranks(self) -> Int32:
        """[num_tracks] rank of each track."""
        return shared_column(self.tracks, "rank")

    def on_same_node(self, one: Int32, other: Int32) -> Mask:
        """[n] True where two ranks share a node."""
        names = {rank.rank: rank.node for rank in self.ranks}
        number = np.zeros(max(names, default=-1) + 1, np.int64)
        number[list(names)] = np.unique(list(names.values()), return_inverse=True)[1]
        same: Mask = number[one] == number[other]
        return same

    def tracks_of(self, kind: TrackKind) -> Mask:
        """[num_tracks] True for tracks of that kind."""
        return np.asarray(shared_column(self.tracks, "kind") == kind, bool)

    def events_of(self, event_class: EventClass) -> Mask:
        """[num_events] True for events of that class."""
        return np.array([event.event_class is event_class for event in self.events], bool)

    def rows_of(self, event: str, rank: int | None = None) -> Int64:
        """[n] indices of the spans of an event, on all ranks or one.

        Raises:
            BadInput: No kernel has such an event, or the timeline no such rank.
        """
        if not any(entry.name == event for entry in self.events):
            raise BadInput(f"event {event!r} is not in this timeline; {similar(event, [e.name for e in self.events])}")
        if rank is not None and rank not in (numbers := [entry.rank for entry in self.ranks]):
            raise BadInput(f"rank {rank} is not in this timeline, which has {ranks(sorted(numbers))}")
        of_event = np.array([entry.name == event for entry in self.events], bool)[self.spans.event]
        return np.flatnonzero(of_event if rank is None else of_event & (self.track_ranks()[self.spans.track] == rank))

    def field(self, rows: Any, name: str) -> Int64:
        """[n] values of a field of these spans, which are all of one event.

        -1 for a field that is set at the end, where a span never closed.

        Raises:
            BadInput: The event has no such field.
        """
        rows = np.atleast_1d(rows)
        if len(rows) == 0:
            return np.empty(0, np.int64)
        event = self.events[self.spans.event[rows[0]]]
        values = field_values(event, name, self.spans, rows)
        if values is None:
            names = [entry.name for entry in (*event.begin_fields, *event.end_fields)]
            raise BadInput(f"event {event.name} has no field {name!r}; {similar(name, names)}")
        return values

    def headless_spans(self) -> Mask:
        """[num_spans] True for spans that began earlier than `start`, because their begin was overwritten."""
        is_headless: Mask = np.array([event.is_headless for event in self.events], bool)[self.spans.event]
        return is_headless


def unpack_field(fields: tuple[Field, ...], name: str, payload: UInt64) -> Int64:
    """[n] values of the field `name` in packed payloads; the first field is in the lowest bits.

    Raises KeyError when there is no such field.
    """
    shift = 0
    for entry in fields:
        if entry.name == name:
            mask = np.uint64((1 << entry.bits) - 1)
            value: Int64 = ((payload >> np.uint64(shift)) & mask).astype(np.int64)
            sign = 1 << (entry.bits - 1) if entry.signed else 0
            return (value ^ sign) - sign  # spreads the sign bit
        shift += entry.bits
    raise KeyError(name)


def field_values(event: EventType, name: str, spans: Spans, rows: Any) -> Int64 | None:
    """[n] what spans of `event` say in a field; None where they have none such.

    Where both ends have it, the end tells what came and the begin what was expected. -1 where the end that would say it
    never came.
    """
    at_begin = event.has(name)
    if not any(field.name == name for field in event.end_fields):
        return unpack_field(event.begin_fields, name, spans.begin_payload[rows]) if at_begin else None
    expected = unpack_field(event.begin_fields, name, spans.begin_payload[rows]) if at_begin else -1
    return np.where(
        spans.end[rows] == OPEN_END, expected, unpack_field(event.end_fields, name, spans.end_payload[rows])
    )
