"""The compiled part. Addresses are plain integers: Python checks tensors, C++ sees address, shape and stream."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

heap_control_bytes: int
layout: dict[str, Any]
max_experts: int
max_ranks: int
p2p_roles: list[str]
p2p_stages: list[str]
p2p_variants: list[str]
simulated_resolution_ticks: int
simulated_ticks_per_second: int

class CpuCommunicator:
    def __init__(
        self, rank: int, heaps: Sequence[int], timeout_ns: int, clock_seed: int = 0, clock_t0_ns: int = 0
    ) -> None: ...
    @property
    def barrier_epoch(self) -> int: ...
    def barrier(self, descriptor: int = 0, record_format: str = "wide") -> None: ...
    def clear_control(self) -> None: ...
    def fault(self) -> dict[str, int] | None: ...
    def set_timeout_ns(self, timeout_ns: int) -> None: ...

class P2PPipelineCpu:
    def __init__(
        self,
        comm: CpuCommunicator,
        *,
        variant: str,
        dtype: str,
        max_tokens: int,
        num_experts: int,
        topk: int,
        hidden: int,
        num_blocks: int,
        warps_per_block: int,
        partitions: int = 2,
        executor: str = "fibers",
    ) -> None: ...
    @property
    def epoch(self) -> int: ...
    def reset(self) -> None: ...
    def run(self, stage: str, descriptor: int = 0, record_format: str = "wide") -> None: ...
    def set_call(
        self, *, x: int, topk_idx: int, topk_weights: int, expert_scale: int, out: int, num_tokens: int
    ) -> None: ...

class PerfettoEncoder:
    def __init__(
        self, tables: dict[str, Any], spans: dict[str, Any], marks: dict[str, Any], flows: dict[str, Any]
    ) -> None: ...
    @property
    def lanes_per_track(self) -> Any: ...
    @property
    def max_packet_bytes(self) -> int: ...
    @property
    def spans_written(self) -> int: ...
    def fill(self, buffer: Any) -> int: ...

def barrier_event_table() -> str: ...
def clock_ping_pong(
    communicator: CpuCommunicator, peer: int, initiates: bool, epoch: int, max_round_trips: int, duration_ns: int
) -> Int64: ...
def p2p_event_table() -> str: ...
def p2p_heap_bytes(
    num_ranks: int,
    max_tokens: int,
    num_experts: int,
    topk: int,
    hidden: int,
    dtype: str,
    variant: str,
    partitions: int = 2,
) -> int: ...
def probe_times(
    *, num_regions: int, num_steps: int, num_rounds: int, record_format: str
) -> tuple[list[float], list[float]]: ...
def read_brackets(communicator: CpuCommunicator, count: int) -> Int64: ...
def read_clock(communicator: CpuCommunicator) -> int: ...
def simulated_clock_host_ns(seed: int, rank: int, t0_ns: int, device_ns: Int64) -> Int64: ...
def simulated_clock_now() -> int: ...
def simulated_clock_ns(seed: int, rank: int, t0_ns: int, host_ns: Int64) -> Int64: ...
def simulated_clock_ticks(seed: int, rank: int, t0_ns: int, host_ns: Int64) -> Int64: ...
