"""Discrete events: warps that work, signal and wait in true time, and what each would have recorded."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from simulator.cases import Case, Noise

_TAIL_DEGREES = 3
_CORRELATION = 0.7
_JITTER_NS = 5_000, 100_000
_OUTLIER = 10, 50
_LEAST = 0.1
"""No time is shorter than such a share of its mean."""


class Warp(NamedTuple):
    rank: int
    number: int
    """Within the rank: streams do not share warps."""
    stream: int = 0


@dataclass(frozen=True)
class Launch:
    """The next kernel of a stream: it begins when all warps of the one before are through and the host is there."""

    name: str
    iteration: int
    is_first: bool = True
    """Of its iteration: injections of hosts apply here."""
    after: int = 0
    """So many kernels of the rank's other stream have to end first."""
    is_injected: bool = False
    """Takes its noise from elsewhere, so that the rest of the run keeps its own; likewise below."""


@dataclass(frozen=True)
class Work:
    event: str
    iteration: int
    base_ns: float
    is_injected: bool = False


@dataclass(frozen=True)
class Pause:
    """Time that no span covers."""

    iteration: int
    base_ns: float
    is_injected: bool = False


@dataclass(frozen=True)
class Signal:
    """To the peer, on a channel `token` or `count` (slot: key), `room` (slot: value) or `meeting` (slot: round)."""

    channel: str
    peer: int
    slot: int
    iteration: int


@dataclass(frozen=True)
class Wait:
    """For the signal of `peer`: of this slot, on `room` of at least that value; at a `meeting` (peer -1) of all."""

    channel: str
    peer: int
    slot: int
    iteration: int


@dataclass(frozen=True)
class Meet:
    """All warps of the kernel."""

    number: int
    iteration: int


Op = Launch | Work | Pause | Signal | Wait | Meet
Program = Iterator[Op]


@dataclass
class Kernel:
    name: str
    start_ns: float
    iteration: int
    enqueued_ns: float
    """When its host began to launch it."""
    stream: int
    warps: tuple[int, ...]
    end_ns: float = 0.0
    num_ended: int = 0
    """How many of its warps have ended."""


@dataclass(frozen=True)
class Record:
    """A span of a warp. begin and end are true times."""

    warp: Warp
    kernel: int
    """Number among the kernels of the rank."""
    event: str
    begin_ns: float
    end_ns: float
    fields: Mapping[str, int]


@dataclass(frozen=True)
class TrueWait:
    """A wait for another rank, or for another warp of the same one."""

    rank: int
    peer: int
    """The rank waited for: at a barrier the one that came last."""
    iteration: int
    channel: str
    begin_ns: float
    end_ns: float
    late_until_ns: float
    """When the signal began; at a barrier, when the last one came."""


@dataclass
class _Posted:
    source: int
    begin_ns: float
    arrives_ns: float


@dataclass
class Run:
    """What happened."""

    kernels: dict[int, list[Kernel]]
    """By rank."""
    records: list[Record]
    waits: list[TrueWait]


@dataclass
class _Process:
    warp: Warp
    program: Program
    rng: np.random.Generator
    injected_rng: np.random.Generator
    kernel: int = -1
    num_launched: int = 0


@dataclass
class _Gathering:
    """Warps of a kernel that have come to a point where all meet."""

    arrived: list[tuple[float, _Process]] = field(default_factory=list)

    @property
    def last_ns(self) -> float:
        return max(time for time, _ in self.arrived)


class Engine:
    """Runs programs to their end; `seed` decides all noise."""

    def __init__(self, case: Case, seed: int, start_ns: float) -> None:
        self.case = case
        self.run_log = Run(defaultdict(list), [], [])
        self._seed, self._start_ns = seed, start_ns
        self._queue: list[tuple[float, int, _Process, Op | None]] = []
        self._order = itertools.count()
        self._posted: dict[Hashable, list[_Posted]] = defaultdict(list)
        self._levels: dict[Hashable, list[tuple[int, _Posted]]] = defaultdict(list)
        self._parked: dict[Hashable, list[tuple[float, _Process, Wait]]] = defaultdict(list)
        self._gathered: dict[Hashable, _Gathering] = defaultdict(_Gathering)
        self._host_rng: dict[Hashable, np.random.Generator] = {}
        self._host_free: dict[Hashable, float] = defaultdict(float)
        """When the host has launched all kernels of a stream so far."""
        self._ready: dict[int, list[tuple[_Gathering, Launch]]] = defaultdict(list)
        """Kernels of a rank that are next on their stream."""
        self._ended: dict[Hashable, list[float]] = defaultdict(list)
        """When the kernels of a stream ended."""
        self._num_warps = Counter[int]()
        """By stream."""
        self._deviation: dict[int, float] = defaultdict(float)
        """The last deviation from the mean that each generator gave."""
        self._speed = _wandering(case, seed)

    def run(self, programs: Mapping[Warp, Program]) -> Run:
        self._num_warps = Counter(warp.stream for warp in programs if warp.rank == 0)
        for warp, program in programs.items():
            rng, injected = (
                np.random.default_rng([self._seed, warp.rank, warp.number, *more]) for more in ((), (1 << 21,))
            )
            host = np.random.default_rng([self._seed, warp.rank, (1 << 20) + warp.stream])
            self._host_rng[warp.rank, warp.stream] = host
            self._resume(self._start_ns, _Process(warp, program, rng, injected))
        while self._queue:
            now, _, process, _ = heapq.heappop(self._queue)
            op = next(process.program, None)
            if op is not None:
                self._execute(now, process, op)
            else:
                self._close_kernel(process, now)
        waiting = [key for key, parked in self._parked.items() if parked] + [*filter(None, self._ready.values())]
        assert not waiting, f"these signals or kernels never came: {waiting}"
        return self.run_log

    def _resume(self, time: float, process: _Process) -> None:
        heapq.heappush(self._queue, (time, next(self._order), process, None))

    def _vary(self, rng: np.random.Generator, ns: float) -> float:
        """`ns` with noise; as many numbers are drawn whatever they are."""
        if self.case.noise_kind is Noise.HEAVY:
            deviation = float(rng.standard_t(_TAIL_DEGREES)) * (1 - 2 / _TAIL_DEGREES) ** 0.5
        else:
            deviation = float(rng.standard_normal())
        if self.case.noise_kind is Noise.AUTOCORRELATED:
            kept = _CORRELATION * self._deviation[id(rng)]
            deviation = kept + deviation * (1 - _CORRELATION**2) ** 0.5
            self._deviation[id(rng)] = deviation
        if self.case.outliers:
            drawn = float(rng.random()) / self.case.outliers
            ns *= np.interp(drawn, (0, 1), _OUTLIER) if drawn < 1 else 1
        return float(ns * max(1 + self.case.noise * deviation, _LEAST))

    def _execute(self, now: float, process: _Process, op: Op) -> None:
        if isinstance(op, Launch):
            self._launch(now, process, op)
        elif isinstance(op, Work):
            rank, warp, _ = process.warp
            base_ns = op.base_ns * self._speed[rank, op.iteration]
            more = sum(entry.work_ns(rank, op.iteration, op.base_ns, warp) for entry in self.case.injections)
            end = now + self._vary(_rng_of(process, op), base_ns) + more
            self._record(process, op.event, now, end, {})
            self._resume(end, process)
        elif isinstance(op, Pause):
            more = sum(entry.pause_ns(process.warp.rank, op.iteration) for entry in self.case.injections)
            self._resume(now + self._vary(_rng_of(process, op), op.base_ns) + more, process)
        elif isinstance(op, Signal):
            self._signal(now, process, op)
        elif isinstance(op, Wait):
            self._wait(now, process, op)
        else:
            self._meet(now, process, op)

    def _record(self, process: _Process, event: str, begin: float, end: float, fields: Mapping[str, int]) -> None:
        self.run_log.records.append(Record(process.warp, process.kernel, event, begin, end, fields))

    def _close_kernel(self, process: _Process, now: float) -> None:
        if process.kernel >= 0:
            rank = process.warp.rank
            kernel = self.run_log.kernels[rank][process.kernel]
            kernel.end_ns, kernel.num_ended = max(kernel.end_ns, now), kernel.num_ended + 1
            if kernel.num_ended == len(kernel.warps):
                self._ended[rank, kernel.stream].append(kernel.end_ns)
                self._begin_ready(rank)

    def _launch(self, now: float, process: _Process, op: Launch) -> None:
        self._close_kernel(process, now)
        rank, stream = process.warp.rank, process.warp.stream
        gathering = self._gathered["launch", rank, stream, process.num_launched]
        gathering.arrived.append((now, process))
        if len(gathering.arrived) == self._num_warps[stream]:
            self._ready[rank].append((gathering, op))
            self._begin_ready(rank)

    def _begin_ready(self, rank: int) -> None:
        """Begins the kernels that wait for nothing more on the other stream of the rank."""
        for gathering, op in self._ready.pop(rank, []):
            stream = gathering.arrived[0][1].warp.stream
            ended = self._ended[rank, 1 - stream]
            if len(ended) < op.after:
                self._ready[rank].append((gathering, op))
                continue
            through = max(gathering.last_ns, ended[op.after - 1] if op.after else 0.0)
            start, asked = self._host_launches((rank, stream), through, gathering.arrived[0][1], op)
            warps = tuple(sorted(process.warp.number for _, process in gathering.arrived))
            self.run_log.kernels[rank].append(Kernel(op.name, start, op.iteration, asked, stream, warps))
            for _, process in gathering.arrived:
                process.kernel = len(self.run_log.kernels[rank]) - 1
                process.num_launched += 1
                self._resume(start, process)

    def _host_launches(self, stream: Hashable, through: float, process: _Process, op: Launch) -> tuple[float, float]:
        """When the kernel begins, and when its host asked for it. through: when the device is free for it."""
        case, rank = self.case, process.warp.rank
        rng = process.injected_rng if op.is_injected else self._host_rng[stream]
        more = sum(entry.host_ns(rank, op.iteration) for entry in case.injections) if op.is_first else 0
        if case.has_host_jitter:
            more += float(np.exp(rng.uniform(*np.log(_JITTER_NS))))
        gap = self._vary(rng, case.gap_ns)
        start = through + gap + more
        if not case.launch_ns:
            return start, start - 0.5 * gap
        waits = op.is_first and not case.hosts_run_ahead
        asked = max(self._host_free[stream], through if waits else self._start_ns) + more
        self._host_free[stream] = asked + self._vary(rng, case.launch_ns)
        return max(through + gap, self._host_free[stream]), asked

    def _meet(self, now: float, process: _Process, op: Meet) -> None:
        rank, last = process.warp.rank, now
        gathering = self._gathered["meet", rank, process.kernel, op.number]
        gathering.arrived.append((now, process))
        if len(gathering.arrived) == self._num_warps[process.warp.stream]:
            end = last + self.case.see_ns
            for time, other in gathering.arrived:
                self._record(other, "wait_block", time, end, {})
                self.run_log.waits.append(TrueWait(rank, rank, op.iteration, "block", time, end, last))
                self._resume(end, other)

    def _signal(self, now: float, process: _Process, op: Signal) -> None:
        case, rank = self.case, process.warp.rank
        usual_ns = case.latency_ns if case.node(rank) == case.node(op.peer) else case.far_latency_ns
        drain, latency = self._vary(process.rng, case.drain_ns), self._vary(process.rng, usual_ns)
        if op.peer == rank:  # its own arrival at a barrier
            drain = latency = 0.0
        drain += sum(entry.drain_ns(rank, op.peer, op.iteration) for entry in case.injections)
        latency += sum(entry.latency_ns(rank, op.peer, op.iteration) for entry in case.injections)
        end = now + drain
        posted = _Posted(rank, now, end + latency)
        slot = "value" if op.channel == "room" else "round" if op.channel == "meeting" else "slot"
        self._record(process, f"signal_{op.channel}", now, end, {"peer": op.peer, slot: op.slot})
        key = _key(op.channel, rank, op.peer, op.slot)
        if op.channel == "room":
            self._levels[key].append((op.slot, posted))
        else:
            self._posted[key].append(posted)
        parked, self._parked[key] = self._parked[key], []
        for begin, other, wait in parked:
            self._try_wait(key, begin, other, wait)
        self._resume(end, process)

    def _wait(self, now: float, process: _Process, op: Wait) -> None:
        self._try_wait(_key(op.channel, op.peer, process.warp.rank, op.slot), now, process, op)

    def _try_wait(self, key: Hashable, begin: float, process: _Process, op: Wait) -> None:
        """Ends the wait if all signals that it needs were sent; else parks it."""
        if op.channel == "room":
            needed = [posted for level, posted in self._levels[key] if level >= op.slot][:1]
        else:
            needed = self._posted[key]
        if len(needed) < (self.case.num_ranks if op.channel == "meeting" else 1):
            self._parked[key].append((begin, process, op))
            return
        case, rank = self.case, process.warp.rank
        end = max(begin, *(posted.arrives_ns for posted in needed)) + self._vary(process.rng, case.see_ns)
        last = max(needed, key=lambda posted: posted.begin_ns)
        self.run_log.waits.append(
            TrueWait(rank, last.source, op.iteration, op.channel, begin, end, min(max(last.begin_ns, begin), end))
        )
        slot = {"room": "wanted", "meeting": "round"}.get(op.channel, "slot")
        peer = {} if op.channel == "meeting" else {"peer": op.peer}
        self._record(process, f"wait_{op.channel}", begin, end, {**peer, slot: op.slot})
        self._resume(end, process)


def _key(channel: str, source: int, destination: int, slot: int) -> Hashable:
    """Of the signals that one wait looks at: of a credit channel all of a pair, of a barrier those of all ranks."""
    if channel == "room":
        return channel, source, destination
    if channel == "meeting":
        return channel, destination, slot
    return channel, source, destination, slot


def _rng_of(process: _Process, op: Work | Pause) -> np.random.Generator:
    return process.injected_rng if op.is_injected else process.rng


def _wandering(case: Case, seed: int) -> np.ndarray:
    """[num_ranks, iterations] how many times as long work takes."""
    if not case.wander:
        return np.ones((case.num_ranks, case.iterations))
    drawn = np.random.default_rng([seed, 1 << 22]).standard_normal((case.num_ranks, case.iterations))
    for iteration in range(1, case.iterations):
        kept = case.wander * drawn[:, iteration - 1]
        drawn[:, iteration] = kept + (1 - case.wander**2) ** 0.5 * drawn[:, iteration]
    return np.maximum(1 + case.wander_share * drawn, _LEAST)
