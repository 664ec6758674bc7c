"""`run moe --sweep-blocks`: the device time of calls and of their kernels with other numbers of blocks.

All choices run in the same processes, one after the other, without a capture. The number of one kernel is changed at a
time. At the end all kernels have the number that was best for their calls.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.calls.call import Variant
from tracekern.moe.families import FAMILY_OF
from tracekern.moe.family import blocks_by_stage
from tracekern.moe.workload.calls_back_to_back import CallsBackToBack, ElapsedMs
from tracekern.moe.workload.options import MoeRun
from tracekern.record.session import Capture

PARTS = (0.125, 0.25, 0.5, 0.75, 1.5, 2.0)
"""Numbers of blocks that each kernel is tried with, as parts of its usual number."""


@dataclass(frozen=True)
class Choice:
    """Numbers of blocks, and the median times of calls with them, each on the rank where it is longest."""

    kernel: str
    """The kernel whose number differs from the usual one; "" for none, and for all of the best."""
    blocks: dict[str, int]
    """Kernel -> blocks."""
    call_us: float = 0.0
    kernel_us: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    """Why it did not run; "" if it did."""


class Sweep:
    """The calls of one rank with all choices. Each is made on all ranks together."""

    def __init__(self, options: MoeRun, group: Group, backend: str, prepare: Callable[[MoeRun], Variant]) -> None:
        self._options, self._group, self._backend, self._prepare = options, group, backend, prepare
        self._stages = FAMILY_OF[options.variant].variants[options.variant]
        self._num_all = 2 + len(PARTS) * len(self._stages)
        self.choices: list[Choice] = []
        self.wrong_elements = self.num_checked = 0

    def run(self) -> None:
        """Runs all choices, the usual one first."""
        usual = self._try("", blocks_by_stage(self._stages, self._options.stage_blocks))
        if usual.problem:
            raise BadInput(usual.problem)
        for kernel in usual.kernel_us:
            if kernel in usual.blocks:  # int4 experts are kernels of another family
                for number in sorted({max(1, round(part * usual.blocks[kernel])) for part in PARTS}):
                    if number != usual.blocks[kernel]:
                        self._try(kernel, usual.blocks | {kernel: number})
        best = {kernel: self._best(kernel).blocks[kernel] for kernel in usual.blocks}
        if sum(best[kernel] != number for kernel, number in usual.blocks.items()) > 1:
            self._try("", best)

    def _best(self, kernel: str) -> Choice:
        """Returns the choice with the fastest calls among those for this kernel and the usual one."""
        found = [choice for choice in self.choices if choice.kernel in ("", kernel) and not choice.problem]
        return min(found, key=lambda choice: choice.call_us)

    def _try(self, kernel: str, blocks: dict[str, int]) -> Choice:
        """Runs the calls of one choice. blocks: of kernels that the variant does not choose them for."""
        try:
            variant = self._prepare(dataclasses.replace(self._options, stage_blocks=blocks))
        except BadInput as error:  # on all ranks
            self.choices.append(Choice(kernel, blocks, problem=str(error)))
            return self.choices[-1]
        blocks = dict.fromkeys(self._stages, variant.num_blocks) | blocks
        num_done = len(self.choices) * self._options.iterations
        calls = _CallsByKernel(self._options, self._group.rank, self._backend, variant, None)
        calls.count_from(num_done, self._num_all * self._options.iterations)
        calls.prepare()
        calls.run()
        self.wrong_elements += calls.wrong_elements
        self.num_checked = calls.num_checked
        mine = {name: 1e3 * statistics.median(ms) for name, ms in {"": calls.times_ms, **calls.kernel_ms}.items()}
        of_ranks = self._group.all_gather(mine, "the times of a choice of blocks")
        longest = {name: max(times[name] for times in of_ranks) for name in mine}
        self.choices.append(Choice(kernel, blocks, longest.pop(""), longest))
        self._group.barrier()
        del variant, calls
        gc.collect()  # frees the heap before the next one is made
        return self.choices[-1]


class _CallsByKernel(CallsBackToBack):
    """Calls that take the time behind each kernel, too."""

    moments_a_call = 10
    """More than any variant has kernels, those of int4 experts included."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kernel_ms: dict[str, list[float]] = {}
        """Times of each kernel, in the order of the calls."""

    def count_from(self, num_done: int, num_all: int) -> None:
        """Sets what rank 0 tells of its progress: calls of all choices, of which `num_done` came before."""
        self._num_done, self._num_all = num_done, num_all

    @property
    def _num_calls(self) -> int:
        return self._num_all

    def _start(self, idx: int, capture: Capture | None, place: int = 0) -> ElapsedMs:
        self._variant.comm.align()
        first = self.moments_a_call * place
        moments, kernels = [self._moment(first)], list[str]()

        def take(kernel: str) -> None:
            moments.append(self._moment(first + len(moments)))
            kernels.append(kernel)

        self._variant.start(self._inputs[idx], capture, self._outputs[idx], take)

        def elapsed_ms() -> float:
            for kernel, begun, ended in zip(kernels, moments, moments[1:], strict=False):
                self.kernel_ms.setdefault(kernel, []).append(self._between_ms(begun, ended))
            return self._between_ms(moments[0], moments[-1])

        return elapsed_ms
