"""What a low latency call is made for, the checks of its tensors, and the launch arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern import _C
from tracekern.comm.communicator import check_choice
from tracekern.comm.group import MAX_HEAP_RANKS, Group
from tracekern.errors import BadInput
from tracekern.formatting import shown
from tracekern.moe.experts import Experts
from tracekern.moe.pipeline import MAX_CPU_WARPS, SPARE_SMS
from tracekern.moe.shape import MAX_EXPERTS, MoeShape, check_range, check_tensor, describe_tensor, require_tensor

if TYPE_CHECKING:
    import torch

    from tracekern.comm.communicator import Communicator
    from tracekern.moe.low_latency.handle import Dispatched

FACTS = _C.families["low_latency"]
SCALE_GROUP: int = FACTS.scale_group
"""Neighbouring values of an fp8 row that share a scale."""
MAX_TOPK: int = FACTS.max_topk
MAX_TOKENS: int = FACTS.max_tokens
NUM_SLOTS: int = FACTS.num_slots
"""Handles of a buffer that may be live at a time."""

FAULT_SLOTS = {"sends": "expert", **dict.fromkeys(("count", "results", "dispatch_ack", "combine_ack"), "local expert")}
"""Channel -> what the slot of a fault record is."""
FAULT_VALUES = {"count": "~token", "results": "token"}
"""Channel -> what the values of its flags count."""
WARPS = {"cuda": 32, "hip": 16, "cpu": 16}
"""Warps of a block, DeepEP's kNumMaxWarpGroups."""
CPU_GROUPS_PER_BLOCK = 8
ALIGNMENT = 16
"""Of the tensors' memory: kernels move 16 bytes at a time."""


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
        """Raises BadInput if a block would have more than 14 groups, or a group fewer than 2 warps."""
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


def check_making(sizes: dict[str, Any], low_latency_mode: Any, executor: Any) -> dict[str, Any]:
    """Raises BadInput for arguments that no Buffer is made with. Returns those in which ranks may not differ."""
    most = {"num_sms": 4096, "num_max_warp_groups": 32}
    for name, value in sizes.items():
        check_range(name, value, 0, most.get(name, 1 << 62))
    check_flag("low_latency_mode", low_latency_mode)
    if sizes["num_nvl_bytes"] or not low_latency_mode:
        raise BadInput("num_nvl_bytes and low_latency_mode=False are for DeepEP's normal mode, which is not here yet")
    check_choice("executor", executor, ("fibers", "threads"))
    return {"num_rdma_bytes": int(sizes["num_rdma_bytes"])}


def check_dispatch(
    comm: Communicator, layout: Layout, shape: LaunchShape, x: torch.Tensor, topk_idx: torch.Tensor, use_fp8: bool
) -> None:
    """Raises BadInput for tensors that dispatch cannot use."""
    import torch

    num_tokens = int(x.shape[0]) if x.ndim == 2 else -1
    check_tensor(comm, "x", x, torch.bfloat16, (num_tokens, layout.hidden))
    check_aligned("x", x)
    _check_topk_idx(comm, shape, topk_idx, num_tokens)
    most = layout.num_max_dispatch_tokens_per_rank
    if num_tokens > most:
        raise BadInput(f"{num_tokens} tokens; num_max_dispatch_tokens_per_rank is {most}")
    if use_fp8 and layout.hidden % SCALE_GROUP:
        raise BadInput(
            f"hidden is {layout.hidden}; fp8 has a scale for {SCALE_GROUP} values: wanted a multiple, or use_fp8=False"
        )
    if comm.device.backend == "cpu":  # on a GPU looking at them would synchronize the stream in every call
        _check_ids(topk_idx, layout.num_experts)


def check_experts(comm: Communicator, layout: Layout, experts: Experts, rows: torch.Tensor) -> None:
    """Raises BadInput for experts that kernels cannot use between dispatch and combine, or for rows of results."""
    num_ranks, most = comm.group.num_ranks, layout.num_max_dispatch_tokens_per_rank
    if not isinstance(experts, Experts):
        raise BadInput(f"experts is {type(experts).__name__}; wanted Experts, or Int4Experts")
    experts.check(comm, MoeShape(num_ranks, most, layout.num_experts, 1, layout.hidden, "bf16"))
    _check_expert_rows(comm, layout, "rows", rows)


def check_combine(
    comm: Communicator,
    dispatched: Dispatched,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """Raises BadInput for tensors that combine cannot use. dispatched: what it belongs to."""
    import torch

    layout, num_tokens, topk = dispatched.layout, dispatched.num_tokens, dispatched.topk
    _check_expert_rows(comm, layout, "x", x)
    require_tensor("topk_idx", topk_idx)
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise BadInput(f"topk_idx is {describe_tensor(topk_idx)}; wanted int64 or int32")
    check_tensor(comm, "topk_idx", topk_idx, topk_idx.dtype, (num_tokens, topk))
    check_tensor(comm, "topk_weights", topk_weights, torch.float32, (num_tokens, topk))
    if out is not None:
        check_tensor(comm, "out", out, torch.bfloat16, (num_tokens, layout.hidden))
        check_aligned("out", out)
    if dispatched.sent_ids is not None:
        _check_ids(topk_idx, layout.num_experts)
        _check_sent(topk_idx, dispatched.sent_ids)


def _check_expert_rows(comm: Communicator, layout: Layout, name: str, rows: torch.Tensor) -> None:
    import torch

    num_local = layout.num_experts // comm.group.num_ranks
    check_tensor(comm, name, rows, torch.bfloat16, (num_local, layout.num_rows(comm.group.num_ranks), layout.hidden))
    check_aligned(name, rows)


def check_flag(name: str, value: Any) -> None:
    """Raises BadInput unless `value` is True or False."""
    if not isinstance(value, bool):
        raise BadInput(f"{name} is {shown(value)}; wanted True or False")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raises BadInput for memory that kernels cannot move 16 bytes at a time."""
    if tensor.data_ptr() % ALIGNMENT:
        raise BadInput(f"{name} begins at an address that {ALIGNMENT} bytes do not divide; clone() it")


def _check_topk_idx(comm: Communicator, shape: LaunchShape, topk_idx: torch.Tensor, num_tokens: int) -> None:
    import torch

    require_tensor("topk_idx", topk_idx)
    if topk_idx.ndim != 2 or topk_idx.dtype not in (torch.int32, torch.int64):
        raise BadInput(f"topk_idx is {describe_tensor(topk_idx)}; wanted int64 or int32 [{num_tokens}, topk]")
    topk = int(topk_idx.shape[1])
    check_tensor(comm, "topk_idx", topk_idx, topk_idx.dtype, (num_tokens, topk))
    check_range("top-k", topk, 1, MAX_TOPK)
    if topk >= shape.num_warps:
        raise BadInput(
            f"top-k is {topk}; a block's {shape.num_warps} warps send at most {shape.num_warps - 1} choices; "
            "take a larger num_max_warp_groups, of `run moe` --warps"
        )


def _check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    wrong = (topk_idx < -1) | (topk_idx >= num_experts)
    if wrong.any():
        token, choice = wrong.nonzero()[0].tolist()
        raise BadInput(bad_choice(token, choice, int(topk_idx[token, choice]), num_experts))
    ordered = topk_idx.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, place = twice.nonzero()[0].tolist()
        expert = int(ordered[token, place])
        choice = (topk_idx[token] == expert).nonzero()[1].item()
        raise BadInput(bad_choice(token, int(choice), expert, num_experts))


def _check_sent(topk_idx: torch.Tensor, sent_ids: torch.Tensor) -> None:
    """Raises BadInput for a choice whose expert the dispatch has sent nothing to: there is no result to add."""
    strange = (topk_idx >= 0) & (topk_idx.unsqueeze(2) != sent_ids.unsqueeze(1)).all(dim=2)
    if strange.any():
        token, choice = strange.nonzero()[0].tolist()
        expert = int(topk_idx[token, choice])
        raise BadInput(
            f"topk_idx[{token}, {choice}] is expert {expert}, to which the dispatch has not sent the token; wanted the "
            "topk_idx of the dispatch, or -1"
        )


def bad_choice(token: int, choice: int, expert: int, num_experts: int) -> str:
    """Returns what is wrong with a choice that no kernel follows."""
    which = f"topk_idx[{token}, {choice}] is expert {expert}"
    if not 0 <= expert < num_experts:
        return f"{which}; wanted -1 (none) or 0 to {num_experts - 1}"
    return f"{which}, which the token has named before; wanted each expert once"
