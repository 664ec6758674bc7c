"""`overlapped`: dispatch and combine of one partition of the tokens while experts multiply another one.

Dispatch and combine are launched once for each partition, experts that are kernels of their own too: these on a second
stream, on SMs that the others leave. Each combine follows its experts, and these their dispatch, by events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern.errors import BadInput
from tracekern.moe.gemm.experts import ExpertKernels, Int4Experts

if TYPE_CHECKING:
    from tracekern.comm.communicator import Communicator
    from tracekern.moe.calls.launches import Launches
    from tracekern.moe.experts import Experts
    from tracekern.moe.shape import MoeShape

OVERLAPPED = "overlapped"
LEAST_RANKS, LEAST_ROWS = 4, 256
"""Ranks, and rows of an expert, from which on `overlapped` takes two partitions. With fewer rows weights that are read
twice cost more than the exchange that is hidden, and on two GPUs of a host the exchange is too short. What was measured
is in docs/int4_sparse.md, by benchmarks/overlap.py."""
EXCHANGE_BLOCKS = 2
"""Blocks of the exchange in `overlapped`, for each rank that a token goes to: so many keep up with the experts."""
MAX_COUNT_BYTES = 40 << 10
"""Shared memory for the counts of all experts in all partitions, at most."""


@dataclass(frozen=True)
class Split:
    """Blocks of the kernels of a call."""

    alone: int
    """Dispatch and combine have so many while no expert multiplies: that of the first partition, and of the last."""
    beside: int
    """They have so many while one does."""
    experts: int
    """SMs that experts get; 0: all."""


@dataclass(frozen=True)
class _Step:
    """One kernel of one partition. It waits for an event of the other stream, and tells one, by name; "": of none."""

    stage: str
    partition: int
    is_of_experts: bool = False
    waits_for: str = ""
    tells: str = ""


class Overlap:
    """The kernels of a call by partition. A key names each: its stage, a slash, the partition."""

    def __init__(
        self, comm: Communicator, native: Any, launches: Launches, split: Split, stage_blocks: Mapping[str, int]
    ) -> None:
        """native: the family's pipeline. stage_blocks: of kernels that have so many in each partition."""
        self._comm, self._native, self._launches = comm, native, launches
        self._split, self._stage_blocks = split, stage_blocks
        self._num_partitions = int(native.num_partitions)
        self._experts: ExpertKernels | None = None
        self._calls: list[Any] = []
        self._steps: dict[str, _Step] = {}
        self._side = _SideStream() if comm.device.backend == "cuda" and self._num_partitions > 1 else None

    def stages_with(self, experts: Experts, num_rows: int) -> tuple[str, ...]:
        """Returns the keys of a call's kernels, in the order of their launches. num_rows: of this rank's experts."""
        if not isinstance(experts, Int4Experts):
            if self._experts is not None or not self._steps:
                self._experts = None
                self._set_steps(())
        elif self._experts is None or self._experts.experts is not experts:
            self._experts = ExpertKernels(self._comm, experts, num_rows, most_sms=self._split.experts)
            off_e, rows = self._native.expert_input
            num_local = len(experts.scale) // self._comm.group.num_ranks
            self._calls = [
                self._experts.call_of(expert_offset=off_e + 4 * num_local * partition, x_rows=rows, result_rows=rows)
                for partition in range(self._num_partitions)
            ]
            self._set_steps(self._experts.stages)
        return tuple(self._steps)

    def run(self, stages: Sequence[str], descriptors: Sequence[int], stream: int) -> None:
        """Launches kernels by their keys; on the CPU runs them. stream: of dispatch and combine."""
        for key, descriptor in zip(stages, descriptors, strict=True):
            step = self._steps[key]
            own = self._side.handle if self._side and step.is_of_experts else stream
            if self._side and step.waits_for:
                self._side.wait(own, step.waits_for)
            if step.is_of_experts:
                assert self._experts is not None
                self._experts.launch(self._calls[step.partition], step.stage, descriptor, own)
            else:
                self._native.set_partition(step.partition)
                self._native.set_blocks(step.stage, self._blocks_of(step))
                self._native.run_stages([step.stage], [descriptor], own)
            if self._side and step.tells:
                self._side.tell(own, step.tells)

    def _set_steps(self, of_experts: Sequence[str]) -> None:
        self._steps = {f"{step.stage}/{step.partition}": step for step in steps_of(self._num_partitions, of_experts)}
        for key, step in self._steps.items():
            if not step.is_of_experts:
                kind = self._launches.kind_of(step.stage)
                blocks = self._blocks_of(step)
                self._launches.add_stage(key, kind.events, kind.roles, blocks, kind.warps, name=step.stage)
        stream = self._side.handle if self._side else 0
        for partition in range(self._num_partitions):
            if self._experts is not None:
                self._experts.add_to(self._launches, suffix=f"/{partition}", stream=stream)

    def _blocks_of(self, step: _Step) -> int:
        if step.stage in self._stage_blocks:
            return self._stage_blocks[step.stage]
        is_first = step.stage == "dispatch" and step.partition == 0
        is_last = step.stage == "combine" and step.partition == self._num_partitions - 1
        return self._split.alone if is_first or is_last or self._experts is None else self._split.beside


def steps_of(num_partitions: int, of_experts: Sequence[str]) -> list[_Step]:
    """Returns the kernels of a call in the order of their launches. of_experts: those of one partition, in order.

    A partition comes in while the one before is multiplied, and goes back while the one behind is. On every rank the
    kernels that wait for other ranks, dispatch and combine, are in the same order, and what they wait for is sent by
    the kernel at the same place: no rank waits for what another one has not begun.
    """
    steps = []
    last = len(of_experts) - 1

    def combine(partition: int) -> _Step:
        return _Step("combine", partition, waits_for=f"multiplied {partition}" if of_experts else "")

    for partition in range(num_partitions):
        came, multiplied = f"came {partition}", f"multiplied {partition}"
        steps.append(_Step("dispatch", partition, tells=came if of_experts else ""))
        for i, stage in enumerate(of_experts):
            waits_for, tells = came if i == 0 else "", multiplied if i == last else ""
            steps.append(_Step(stage, partition, True, waits_for, tells))
        if partition:
            steps.append(combine(partition - 1))
    return [*steps, combine(num_partitions - 1)]


def num_overlapped(shape: MoeShape) -> int:
    """Returns the default number of partitions of a rank's tokens in the overlapped variant."""
    has_rows = shape.num_ranks * shape.max_tokens * shape.topk >= LEAST_ROWS * shape.num_experts
    return 2 if has_rows and shape.num_ranks >= LEAST_RANKS else 1


def destinations(shape: MoeShape) -> float:
    """Returns how many ranks a token goes to if each choice is equally likely to be on any rank."""
    return float(shape.num_ranks * (1 - (1 - 1 / shape.num_ranks) ** shape.topk))


def num_exchange_blocks(shape: MoeShape) -> int:
    """Returns the default number of blocks of the exchange on a GPU while experts multiply."""
    return math.ceil(EXCHANGE_BLOCKS * destinations(shape))


def check_cells(shape: MoeShape, partitions: int) -> None:
    """Raises BadInput where counts of the experts of all partitions do not fit a block's shared memory."""
    num_bytes = 4 * (shape.num_experts + shape.num_ranks) * partitions
    if num_bytes > MAX_COUNT_BYTES:
        most = MAX_COUNT_BYTES // (4 * (shape.num_experts + shape.num_ranks))
        raise BadInput(f"partitions is {partitions}; with {shape.num_experts} experts overlapped takes at most {most}")


class _SideStream:
    """A stream of a GPU beside the one of a call, and events between both."""

    def __init__(self) -> None:
        import torch

        # Of those with priority: torch deals streams out in turns, and those without may be resident ranks' own ones.
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._events: dict[str, torch.cuda.Event] = {}
        self.handle = int(self._stream.cuda_stream)

    def tell(self, stream: int, name: str) -> None:
        """Records an event behind what was launched on a stream."""
        import torch

        event = self._events.setdefault(name, torch.cuda.Event())  # type: ignore[no-untyped-call]
        event.record(_stream_of(stream))

    def wait(self, stream: int, name: str) -> None:
        """Makes what is launched on a stream from now on wait for an event."""
        _stream_of(stream).wait_event(self._events[name])


def _stream_of(handle: int) -> Any:
    """Returns torch's stream with this handle. To ExternalStream() 0 is not the default stream, but a new one."""
    import torch

    return torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()  # type: ignore[no-untyped-call]
