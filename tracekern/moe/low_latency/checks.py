"""The checks of a low latency call: of what a Buffer is made with, and of tensors that kernels are to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekern.comm.communicator import check_choice
from tracekern.errors import BadInput
from tracekern.moe.calls.deepep import check_aligned, check_flag, refuse_later, say_meaningless
from tracekern.moe.experts import Experts
from tracekern.moe.low_latency.handle import Dispatched
from tracekern.moe.low_latency.settings import SCALE_GROUP, LaunchShape, Layout
from tracekern.moe.shape import MAX_TOPK, MoeShape, check_range, check_tensor, describe_tensor, require_tensor

if TYPE_CHECKING:
    import torch

    from tracekern.comm.communicator import Communicator


DEFAULT_QPS = 24
"""DeepEP's num_qps_per_rank."""


def check_making(given: dict[str, Any], enable_shrink: Any, mpi: Any, executor: Any) -> dict[str, Any]:
    """Raises BadInput for arguments that no Buffer is made with. Returns those in which ranks may not differ."""
    most = {"num_sms": 4096, "num_max_warp_groups": 32}
    for name, value in given.items():
        if name.startswith("num_"):
            check_range(name, value, 0, most.get(name, 1 << 62))
        else:
            check_flag(name, value)
    if given["num_nvl_bytes"]:
        raise BadInput("num_nvl_bytes is for DeepEP's normal mode, which this class does not have; leave it out")
    refuse_later(enable_shrink=enable_shrink, comm=mpi)
    say_meaningless(
        {
            "num_qps_per_rank": given["num_qps_per_rank"] != DEFAULT_QPS,
            "allow_nvlink_for_low_latency_mode": not given["allow_nvlink_for_low_latency_mode"],
            "allow_mnnvl": given["allow_mnnvl"],
        }
    )
    check_choice("executor", executor, ("fibers", "threads"))
    return {"num_rdma_bytes": int(given["num_rdma_bytes"])}


def check_dispatch(
    comm: Communicator,
    layout: Layout,
    shape: LaunchShape,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    use_fp8: bool,
    use_ue8m0: bool,
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
    if use_ue8m0 and layout.hidden % (4 * SCALE_GROUP):
        raise BadInput(f"hidden is {layout.hidden}; use_ue8m0 packs 4 scales: wanted a multiple of {4 * SCALE_GROUP}")
    if comm.device.backend == "cpu":  # on a GPU looking at them would synchronize the stream in every call
        _check_ids(topk_idx, layout.num_experts)


def check_casting(use_fp8: Any, round_scale: Any, use_ue8m0: Any) -> None:
    """Raises BadInput for ways of casting that do not go together."""
    for name, value in (("use_fp8", use_fp8), ("round_scale", round_scale), ("use_ue8m0", use_ue8m0)):
        check_flag(name, value)
    if use_ue8m0 and not round_scale:
        raise BadInput("use_ue8m0 keeps the exponents of scales that are powers of two; set round_scale=True, too")


def check_asynchronous(async_finish: Any, return_recv_hook: Any) -> None:
    """Raises BadInput for two ways of going on before a call has ended."""
    check_flag("async_finish", async_finish)
    check_flag("return_recv_hook", return_recv_hook)
    if async_finish and return_recv_hook:
        raise BadInput("async_finish and return_recv_hook: take one of them")


def check_statistics(comm: Communicator, name: str, tensor: torch.Tensor | None, dtype: torch.dtype, size: int) -> None:
    """Raises BadInput for a tensor that kernels cannot add to."""
    if tensor is not None:
        check_tensor(comm, name, tensor, dtype, (size,))


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
