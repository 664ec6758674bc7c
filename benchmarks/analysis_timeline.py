"""A Timeline of any size as the P2P kernels would leave it: 8 ranks x 128 warps, calls of four kernels.

Times are drawn, but what waits is computed: a wait ends when the signal it names was sent and seen, and a kernel begins
when all warps of the one before have ended. Ranks come late as their hosts and their work make them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.timeline.model import (
    Channel,
    ChannelKind,
    ClockFit,
    EventClass,
    EventType,
    Field,
    Flows,
    Launch,
    Rank,
    Spans,
    Timeline,
    Track,
    TrackKind,
)

Int64 = npt.NDArray[np.int64]

NUM_RANKS, NUM_BLOCKS, NUM_WARPS, NUM_TOKENS = 8, 32, 4, 8
NUM_TRACKS = NUM_BLOCKS * NUM_WARPS
STAGES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
SPANS_OF_STAGE = (2 * NUM_TOKENS, 2 * NUM_TOKENS, 2 * NUM_TOKENS, NUM_TOKENS + NUM_TOKENS // 4 * 2)
SPANS_OF_CALL = sum(SPANS_OF_STAGE)
SEE_NS, FOUND_NS = 400, 60

_PEER, _SLOT, _EXPERT = Field("peer", 10), Field("slot", 22), Field("expert", 16)
_TOKEN = Channel("token", ChannelKind.DATA, ("slot",))
_RESULT = Channel("result", ChannelKind.DATA, ("slot",))
_KEY = (_PEER, _SLOT, _EXPERT)
EVENTS = (
    EventType("copy_token", EventClass.WORK, "issue", None, _KEY),
    EventType("signal_token", EventClass.SIGNAL, "completion", _TOKEN, _KEY),
    EventType("wait_token", EventClass.WAIT, "completion", _TOKEN, _KEY),
    EventType("receive_token", EventClass.WORK, "issue", None, _KEY),
    EventType("send_result", EventClass.WORK, "issue", None, _KEY),
    EventType("signal_result", EventClass.SIGNAL, "completion", _RESULT, _KEY),
    EventType("wait_result", EventClass.WAIT, "completion", _RESULT, _KEY),
    EventType("wait_block", EventClass.WAIT, "completion"),
    EventType("reduce_token", EventClass.WORK, "issue", None, (Field("token", 32),)),
    *(EventType(stage, EventClass.LAUNCH, "completion") for stage in STAGES),
)
_NUMBER = {event.name: idx for idx, event in enumerate(EVENTS)}


class _Clock:
    """Writes the spans of all warps at once, one after the other: [rank, warp, call, span of the call]."""

    def __init__(self, num_calls: int) -> None:
        shape = (NUM_RANKS, NUM_TRACKS, num_calls, SPANS_OF_CALL)
        self.start, self.end = np.empty(shape, np.int64), np.empty(shape, np.int64)
        self.peer = np.zeros(shape, np.uint64)
        self.event = np.zeros(SPANS_OF_CALL, np.int32)
        self.launches = np.empty((NUM_RANKS, num_calls, len(STAGES), 2), np.int64)
        self.now = np.zeros((NUM_RANKS, NUM_TRACKS), np.int64)
        self.call = self.place = 0

    def span(self, event: str, until: Int64, peer: Int64 | int = 0) -> int:
        """Returns its place in the call."""
        at = (slice(None), slice(None), self.call, self.place)
        self.start[at], self.end[at], self.peer[at] = self.now, until, peer
        self.event[self.place] = _NUMBER[event]
        self.now = until
        self.place += 1
        return self.place - 1


@dataclass(frozen=True)
class _Edge:
    signal: int
    wait: int
    """Places in the call; warp w of rank r waits for warp w of rank source[r, w]."""
    source: Int64


def make_timeline(num_spans: int, seed: int = 7) -> Timeline:
    """About `num_spans` spans, a tenth less or more."""
    num_calls = max(1, round(num_spans / (NUM_RANKS * NUM_TRACKS * SPANS_OF_CALL)))
    rng = np.random.default_rng(seed)
    clock = _Clock(num_calls)
    edges: list[_Edge] = []
    for call in range(num_calls):
        clock.call, clock.place = call, 0
        edges = _run_call(clock, rng)
    return _to_timeline(clock, edges, num_calls)


def _run_call(clock: _Clock, rng: np.random.Generator) -> list[_Edge]:
    edges = []
    rank, warp = np.ogrid[:NUM_RANKS, :NUM_TRACKS]
    ends: dict[tuple[str, int], int] = {}

    def drawn(mean_ns: float) -> Int64:
        return (mean_ns * rng.lognormal(-0.1, 0.45, clock.now.shape)).astype(np.int64) + 20

    for stage, name in enumerate(STAGES):
        host = rng.exponential(6000, (NUM_RANKS, 1)) + (20_000 if stage == 0 else 0) * rng.random((NUM_RANKS, 1))
        clock.now = clock.now.max(axis=1, keepdims=True) + 3000 + host.astype(np.int64) + np.zeros_like(clock.now)
        clock.launches[:, clock.call, stage, 0] = clock.now[:, 0]
        first, second = ("copy_token", "signal_token") if stage == 0 else ("send_result", "signal_result")
        for token in range(NUM_TOKENS):
            hop = 1 + (warp + token) % (NUM_RANKS - 1)
            if name.endswith("_send"):
                clock.span(first, clock.now + drawn(900), (rank - hop) % NUM_RANKS)
                ends[second, token] = clock.span(second, clock.now + drawn(300), (rank - hop) % NUM_RANKS)
                continue
            half = "token" if stage == 1 else "result"
            source = (rank + hop) % NUM_RANKS
            signal = ends[f"signal_{half}", token]
            seen = clock.end[source, warp, clock.call, signal] + SEE_NS
            wait = clock.span(f"wait_{half}", np.maximum(clock.now + FOUND_NS, seen), source)
            edges.append(_Edge(signal, wait, source))
            if stage == 1:
                clock.span("receive_token", clock.now + drawn(700), source)
            elif token % 4 == 3:
                met = clock.now.reshape(NUM_RANKS, NUM_BLOCKS, NUM_WARPS).max(axis=2, keepdims=True) + 100
                clock.span(
                    "wait_block", np.broadcast_to(met, (NUM_RANKS, NUM_BLOCKS, NUM_WARPS)).reshape(clock.now.shape)
                )
                clock.span("reduce_token", clock.now + drawn(800))
        clock.launches[:, clock.call, stage, 1] = clock.now.max(axis=1)
    return edges


def _to_timeline(clock: _Clock, edges: list[_Edge], num_calls: int) -> Timeline:
    shape, num_device = clock.start.shape, clock.start.size
    number = np.arange(num_device).reshape(shape)
    warp = np.arange(NUM_TRACKS)[None, :]
    signals = [number[edge.source, warp, :, edge.signal].ravel() for edge in edges]
    waits = [number[:, :, :, edge.wait].ravel() for edge in edges]
    flows = np.stack([np.concatenate(signals), np.concatenate(waits)])
    flows = flows[:, np.argsort(flows[1], kind="stable")]

    launch_of_span = np.repeat(np.arange(len(STAGES)), SPANS_OF_STAGE)
    launch = (np.arange(NUM_RANKS)[:, None] * num_calls + np.arange(num_calls)) * len(STAGES)
    launches = launch[:, None, :, None] + launch_of_span
    lanes = clock.launches.reshape(-1, 2)
    device = np.repeat(np.arange(NUM_RANKS * NUM_TRACKS, dtype=np.int32), num_calls * SPANS_OF_CALL)
    lane = np.repeat(np.arange(NUM_RANKS, dtype=np.int32), num_calls * len(STAGES)) + NUM_RANKS * NUM_TRACKS
    slot = np.tile(np.arange(SPANS_OF_CALL, dtype=np.uint64) << np.uint64(10), num_device // SPANS_OF_CALL)
    payload = np.concatenate([clock.peer.ravel() | slot, np.zeros(len(lanes), np.uint64)])
    lane_event = np.tile(np.arange(len(EVENTS) - len(STAGES), len(EVENTS), dtype=np.int32), NUM_RANKS * num_calls)
    spans = Spans(
        track=np.concatenate([device, lane]),
        event=np.concatenate([np.tile(clock.event, num_device // SPANS_OF_CALL), lane_event]),
        launch=np.concatenate([np.broadcast_to(launches, shape).ravel(), np.arange(len(lanes))]).astype(np.int32),
        start=np.concatenate([clock.start.ravel(), lanes[:, 0]]),
        end=np.concatenate([clock.end.ravel(), lanes[:, 1]]),
        begin_payload=payload,
        end_payload=np.zeros(len(payload), np.uint64),
    )
    return Timeline("ns", _ranks(), _tracks(), EVENTS, _launches(num_calls), spans, flows=Flows(flows[0], flows[1]))


def _ranks() -> tuple[Rank, ...]:
    metadata = {"settings": {"hidden": 7168, "dtype": "bf16"}}
    return tuple(
        Rank(rank, "node-a", "synthetic", "cpu", "closed", 1e9, 32, ClockFit("ping-pong", 300.0, 20.0), metadata)
        for rank in range(NUM_RANKS)
    )


def _tracks() -> tuple[Track, ...]:
    device = [
        Track(rank, TrackKind.DEVICE, f"block {block} warp {warp}", 0, block, warp, block, "send/receive/reduce")
        for rank in range(NUM_RANKS)
        for block in range(NUM_BLOCKS)
        for warp in range(NUM_WARPS)
    ]
    return (*device, *(Track(rank, TrackKind.LAUNCH, "stream 0") for rank in range(NUM_RANKS)))


def _launches(num_calls: int) -> tuple[Launch, ...]:
    return tuple(
        Launch(rank, call * 4 + idx, name, call, 0, call, NUM_BLOCKS, NUM_WARPS, NUM_TRACKS, 64, 0, 64)
        for rank in range(NUM_RANKS)
        for call in range(num_calls)
        for idx, name in enumerate(STAGES)
    )
