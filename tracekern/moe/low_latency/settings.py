"""What a low latency call is made for, and the launch arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracekern.comm.ranks.group import MAX_HEAP_RANKS, Group
from tracekern.errors import BadInput
from tracekern.moe.calls.native import NativeFamily
from tracekern.moe.calls.pipeline import MAX_CPU_WARPS, SPARE_SMS
from tracekern.moe.shape import MAX_EXPERTS, check_range

FACTS = NativeFamily("low_latency")
SCALE_GROUP = 128
"""Neighbouring values of an fp8 row that share a scale."""
MAX_TOKENS = (1 << 16) - 1
MAX_FAR_EXPERTS = 256
"""Experts of a rank that an immediate tells apart: it has 8 bits for them (csrc/comm/immediate.h)."""
NUM_SLOTS = 2
"""Handles of a buffer that may be live at a time."""

FAULT_SLOTS = dict.fromkeys(("message", "count", "results", "any_result"), "local expert")
"""Channel -> what the slot of a fault record is."""
FAULT_VALUES = {"count": "~token", "results": "token"}
"""Channel -> what the values of its flags count."""
WARPS = {"cuda": 32, "hip": 16, "cpu": 16}
"""Warps of a block, DeepEP's kNumMaxWarpGroups."""
CPU_GROUPS_PER_BLOCK = 8


@dataclass(frozen=True)
class Layout:
    """What offsets in the heap follow from. All calls of a buffer have the same one until it is cleaned."""

    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int

    @classmethod
    def of(cls, num_max_dispatch_tokens_per_rank: Any, hidden: Any, num_experts: Any, num_ranks: Any) -> Layout:
        """Raises BadInput for what are no whole numbers, and for numbers that no kernel runs with."""
        check_range("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1, MAX_TOKENS)
        check_range("num_experts", num_experts, 1, MAX_EXPERTS)
        check_range("hidden", hidden, 8, 1 << 20)
        check_range("num_ranks", num_ranks, 1, MAX_HEAP_RANKS)
        if num_experts % num_ranks:
            raise BadInput(f"{num_experts} experts do not divide over {num_ranks} ranks")
        if hidden % 8:
            raise BadInput(f"hidden is {hidden}; wanted a multiple of 8, which are 16 bytes of bf16")
        return cls(int(num_max_dispatch_tokens_per_rank), int(hidden), int(num_experts))

    def check_network(self, num_ranks: int, max_bytes: int) -> None:
        """Raises BadInput for calls of which a network cannot tell. max_bytes: that it writes as one."""
        num_local, most = self.num_experts // num_ranks, int(FACTS.message_bytes(self.hidden, False))
        if num_local > MAX_FAR_EXPERTS:
            raise BadInput(
                f"{num_local} experts on each rank; between hosts wanted at most {MAX_FAR_EXPERTS}; take more ranks"
            )
        if most > max_bytes:
            raise BadInput(
                f"hidden is {self.hidden}, messages {most} bytes; the network between hosts writes {max_bytes} at most"
            )

    def native(self, num_ranks: int) -> dict[str, Any]:
        """Returns the options of the native functions."""
        return {
            "variant": "low_latency",
            "dtype": "bf16",
            "num_ranks": num_ranks,
            "max_tokens": self.num_max_dispatch_tokens_per_rank,
            "num_experts": self.num_experts,
            "hidden": self.hidden,
            "topk": 1,
            "fp8": 0,
        }

    def workload(self, use_fp8: bool, topk: int) -> dict[str, Any]:
        """Returns what a capture keeps of calls, under the names that `run moe` has for it."""
        return {
            "variant": "low_latency",
            "tokens": self.num_max_dispatch_tokens_per_rank,
            "hidden": self.hidden,
            "experts": self.num_experts,
            "topk": topk,
            "dtype": "bf16",
            "dispatch_dtype": "fp8" if use_fp8 else "bf16",
        }

    def heap_bytes(self, num_ranks: int) -> int:
        return int(FACTS.heap_bytes(**self.native(num_ranks)))

    def num_rows(self, num_ranks: int) -> int:
        """Returns the rows of one local expert in a packed tensor."""
        return num_ranks * self.num_max_dispatch_tokens_per_rank


@dataclass(frozen=True)
class LaunchShape:
    """How warps are dealt out (csrc/moe/low_latency/launch.h): blocks, groups of a block, warps of a group."""

    num_warp_groups: int
    num_warps_per_group: int
    num_sms: int

    @classmethod
    def of(cls, num_experts: int, num_device_sms: int, num_max_warp_groups: int) -> LaunchShape:
        """Raises BadInput if an SM would have more than 28 groups, or a group fewer than 2 warps."""
        try:
            return cls(*FACTS.launch_shape(num_experts, num_device_sms, num_max_warp_groups))
        except ValueError as error:
            raise BadInput(str(error)) from None

    @classmethod
    def choose(
        cls, group: Group, num_experts: int, num_sms: int, num_max_warp_groups: int, backend: str, topk: int = 0
    ) -> LaunchShape:
        """Returns the shape for this machine. 0 stands for what suits the backend: on a GPU all SMs but SPARE_SMS, of
        which resident ranks get an equal part each, and 32 warps; on the CPU 8 groups of 2 warps a block, or of as many
        as send `topk` choices.
        """
        if backend == "cpu":
            num_sms = num_sms or -(-num_experts // CPU_GROUPS_PER_BLOCK)
        elif not num_sms:
            import torch

            # Where there is no GPU the communicator says so.
            has_gpu = torch.cuda.is_available()
            present = torch.cuda.get_device_properties().multi_processor_count if has_gpu else 132
            num_sms = max(1, (present - SPARE_SMS) // group.num_residents)
        shape = cls.of(num_experts, num_sms, num_max_warp_groups or WARPS[backend])
        if not num_max_warp_groups and topk >= shape.num_warps:  # a warp sends one choice, and another one counts
            shape = cls.of(num_experts, num_sms, shape.num_warp_groups * (topk // shape.num_warp_groups + 1))
        if backend == "cpu":
            check_range("warps of all blocks", shape.num_sms * shape.num_warps, 1, MAX_CPU_WARPS)
        return shape

    @property
    def num_warps(self) -> int:
        """Warps of a block."""
        return self.num_warp_groups * self.num_warps_per_group
