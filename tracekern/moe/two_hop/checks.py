"""The checks of two-hop calls: of what a Buffer is made with, and of tensors that kernels are to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekern.comm.communicator import check_choice
from tracekern.errors import BadInput
from tracekern.moe.calls.deepep import check_aligned, check_flag
from tracekern.moe.calls.pipeline import MAX_CPU_WARPS
from tracekern.moe.gemm import checks as gemm_checks
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.shape import MAX_EXPERTS, MoeShape, check_range, check_tensor, describe_tensor, require_tensor
from tracekern.moe.two_hop.handle import Given, Handle
from tracekern.moe.two_hop.layout import MAX_NODES, Nodes, channel_places, channel_prefix_matrix, is_token_in_node
from tracekern.moe.two_hop.settings import FACTS, MAX_TOPK, SCALE_GROUP, Config, Layout, block_warps

if TYPE_CHECKING:
    import torch

    from tracekern.comm.communicator import Communicator

_MAKES_LAYOUT = "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert"


def check_making(
    num_ranks: int, sizes: dict[str, Any], low_latency_mode: Any, executor: Any, num_nodes: Any, max_tokens: Any
) -> dict[str, Any]:
    """Raises BadInput for arguments that no Buffer is made with. Returns those in which ranks may not differ."""
    for name, value in sizes.items():
        check_range(name, value, 0, 1 << 62)
    check_flag("low_latency_mode", low_latency_mode)
    if low_latency_mode:
        raise BadInput("low_latency_mode is True; that is tracekern.moe.calls.buffer.Buffer")
    check_choice("executor", executor, ("fibers", "threads"))
    check_range("num_nodes", num_nodes, 1, MAX_NODES)
    nodes = Nodes.of(num_ranks, num_nodes)
    check_range("num_max_tokens_per_rank", max_tokens, 1, FACTS.max_tokens // num_ranks)
    return {**{name: int(value) for name, value in sizes.items()}, **vars(nodes), "max_tokens": int(max_tokens)}


def check_config(config: Any, nodes: Nodes, max_tokens: int, backend: str) -> Config:
    """Raises BadInput for what is no Config, and for one that these ranks cannot have."""
    if not isinstance(config, Config):
        raise BadInput(f"config is {type(config).__name__}; wanted tracekern.moe.two_hop.Config")
    most_slots = max(config.num_max_nvl_chunked_recv_tokens, config.num_max_rdma_chunked_recv_tokens)
    if nodes.num_ranks * max_tokens + most_slots > FACTS.max_tokens:
        raise BadInput(
            f"num_max_tokens_per_rank is {max_tokens}; with {nodes.num_ranks} ranks and rings of {most_slots} slots "
            f"wanted at most {(FACTS.max_tokens - most_slots) // nodes.num_ranks}"
        )
    if backend == "cpu":
        check_range("warps of all blocks", config.num_sms * block_warps(nodes, backend), 1, MAX_CPU_WARPS)
    return config


def check_dispatch(
    comm: Communicator, nodes: Nodes, max_tokens: int, config: Config, x: Any, arguments: dict[str, Any]
) -> tuple[Layout, Given]:
    """Returns what the call needs of the heap, and its tensors. arguments: of dispatch(), by name. Raises BadInput."""
    import torch

    in_rank = arguments["is_token_in_rank"]
    if nodes.num_nodes == 1 and arguments["num_tokens_per_rdma_rank"] is None and isinstance(in_rank, torch.Tensor):
        arguments["num_tokens_per_rdma_rank"] = in_rank.any(-1).sum(dtype=torch.int32).reshape(1)
    for name in _MAKES_LAYOUT:
        if arguments[name] is None:
            raise BadInput(f"{name} is missing; get_dispatch_layout() returns it")
    check_range("expert_alignment", arguments["expert_alignment"], 1, 1 << 20)
    check_range("num_worst_tokens", arguments["num_worst_tokens"], 0, FACTS.max_tokens)
    if comm.device.streams.is_captured() and not arguments["num_worst_tokens"]:
        raise BadInput(
            "a graph is being captured, and nobody waits for its counts; give num_worst_tokens, the most rows that come"
        )
    values, scales = _check_x(comm, x)
    num_tokens, hidden = values.shape
    if num_tokens > max_tokens:
        raise BadInput(f"x has {num_tokens} tokens; the buffer was made with num_max_tokens_per_rank={max_tokens}")
    experts = arguments["num_tokens_per_expert"]
    require_tensor("num_tokens_per_expert", experts)
    num_experts = int(experts.shape[0]) if experts.ndim == 1 else 0
    check_range("experts", num_experts, 1, MAX_EXPERTS)
    if num_experts % nodes.num_ranks:
        raise BadInput(f"{num_experts} experts on {nodes.num_ranks} ranks; wanted as many on each")
    for name, dtype, size in (
        ("num_tokens_per_rank", torch.int32, (nodes.num_ranks,)),
        ("num_tokens_per_rdma_rank", torch.int32, (nodes.num_nodes,)),
        ("num_tokens_per_expert", torch.int32, (num_experts,)),
        ("is_token_in_rank", torch.bool, (num_tokens, nodes.num_ranks)),
    ):
        check_tensor(comm, name, arguments[name], dtype, size)
    topk = _check_choices(comm, num_tokens, arguments["topk_idx"], arguments["topk_weights"])
    given = Given(values, scales, **arguments)
    if comm.device.backend == "cpu":  # on a GPU looking at them would synchronize the stream in every call
        _check_belongs(given, nodes, num_experts)
    return Layout(num_experts, topk, int(hidden), scales is not None, config), given


def check_handle(comm: Communicator, nodes: Nodes, layout: Layout | None, handle: Any, config: Any) -> Handle:
    """Returns a handle whose tensors kernels can use. layout: of the dispatch before. Raises BadInput."""
    import torch

    if not isinstance(handle, tuple) or len(handle) != len(Handle._fields):
        raise BadInput(f"handle is {type(handle).__name__}; wanted the one that dispatch() returned")
    if layout is None:
        raise BadInput("nothing was dispatched; a call with a handle goes the way of a dispatch")
    if config is not None and config != layout.config:
        raise BadInput(f"config is {config}; the dispatch had {layout.config}: leave it out")
    parts, channels = Handle(*handle), layout.config.num_channels
    for name, part in parts._asdict().items():
        require_tensor(f"handle.{name}", part)
    num_tokens, num_rows, num_forwarded = (
        int(part.shape[0]) if part.ndim else 0
        for part in (parts.is_token_in_rank, parts.recv_src_meta, parts.send_nvl_head)
    )
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "is_token_in_rank": (torch.bool, (num_tokens, nodes.num_ranks)),
        "rdma_channel_prefix_matrix": (torch.int32, (nodes.num_nodes, channels)),
        "gbl_channel_prefix_matrix": (torch.int32, (nodes.num_ranks, channels)),
        "recv_rdma_channel_prefix_matrix": (torch.int32, (nodes.num_nodes, channels)),
        "recv_rdma_rank_prefix_sum": (torch.int32, (nodes.num_nodes,)),
        "recv_gbl_channel_prefix_matrix": (torch.int32, (nodes.num_ranks, channels)),
        "recv_gbl_rank_prefix_sum": (torch.int32, (nodes.num_ranks,)),
        "recv_src_meta": (torch.uint8, (num_rows, 8)),
        "send_rdma_head": (torch.int32, (num_tokens, nodes.num_nodes)),
        "send_nvl_head": (torch.int32, (num_forwarded, nodes.peers)),
    }
    for name, (dtype, size) in sizes.items():
        check_tensor(comm, f"handle.{name}", getattr(parts, name), dtype, size)
    if not parts.number:
        raise BadInput("handle has parts that no dispatch returned, or several have; wanted those that one returned")
    if comm.device.backend == "cpu":  # as in check_dispatch(); kernels compare them with the sizes of tensors
        _check_handle_numbers(nodes, channels, parts)
    return parts


def _check_handle_numbers(nodes: Nodes, num_channels: int, parts: Handle) -> None:
    """Raises BadInput for a handle whose numbers contradict each other."""
    import torch

    in_rank = parts.is_token_in_rank
    in_node = is_token_in_node(in_rank, nodes)
    row_sums, row_starts = parts.recv_gbl_rank_prefix_sum, parts.recv_gbl_channel_prefix_matrix
    forwarded_sums, forwarded = parts.recv_rdma_rank_prefix_sum, parts.recv_rdma_channel_prefix_matrix
    pad = torch.nn.functional.pad
    ends = pad(forwarded_sums, (1, 0))[:-1, None] + forwarded
    steps = {
        "recv_gbl_channel_prefix_matrix": torch.cat([row_starts.flatten(), row_sums[-1:]]),
        "recv_rdma_channel_prefix_matrix": pad(ends.flatten(), (1, 0)),
    }
    same = {
        "rdma_channel_prefix_matrix": channel_prefix_matrix(in_node, num_channels),
        "gbl_channel_prefix_matrix": channel_prefix_matrix(in_rank, num_channels),
        "send_rdma_head": channel_places(in_node, num_channels),
        "recv_rdma_rank_prefix_sum": ends[:, -1],
        "recv_gbl_rank_prefix_sum": torch.cat([row_starts[1:, 0], row_sums[-1:]]),
    }
    wrong = [name for name, due in same.items() if not torch.equal(getattr(parts, name), due)]
    wrong += [name for name, sums in steps.items() if sums[0] != 0 or (sums.diff() < 0).any()]
    if not wrong and forwarded_sums[-1] <= len(parts.send_nvl_head):  # more were not received: the kernels refuse that
        goes_to = parts.send_nvl_head[: forwarded_sums[-1]] >= 0
        so_far = pad(goes_to.cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
        starts = steps["recv_rdma_channel_prefix_matrix"]
        earlier = so_far[starts[:-1]].repeat_interleave(starts.diff(), 0)
        places = torch.where(goes_to, so_far[1:] - 1 - earlier, -1)
        if not torch.equal(parts.send_nvl_head[: len(places)], places):
            wrong.append("send_nvl_head")
    if wrong:
        raise BadInput(f"handle.{wrong[0]} is not as dispatch() returned it; keep handles as they are")


def refuse_beside_handle(arguments: dict[str, Any]) -> None:
    """Raises BadInput for arguments of a dispatch that one with a handle does not take."""
    usual = {"expert_alignment": 1, "num_worst_tokens": 0}
    given = [
        name for name, value in arguments.items() if value is not None and not (name in usual and value == usual[name])
    ]
    if given:
        raise BadInput(f"handle is given, and {', '.join(given)}, too; a call with a handle takes none of them")


def check_cached_dispatch(
    comm: Communicator, layout: Layout, x: Any, parts: Handle
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the values that a dispatch with a handle sends, and their scales. Raises BadInput."""
    values, scales = _check_x(comm, x)
    kind = "fp8" if layout.is_fp8 else "bf16"
    if values.shape != (len(parts.is_token_in_rank), layout.hidden) or (scales is not None) != layout.is_fp8:
        raise BadInput(
            f"x is {describe_tensor(values)}; the dispatch of the handle had {kind} "
            f"[{len(parts.is_token_in_rank)}, {layout.hidden}]"
        )
    return values, scales


def check_combine(
    comm: Communicator, nodes: Nodes, layout: Layout, x: Any, parts: Handle, topk_weights: Any, bias: Any
) -> tuple[torch.Tensor, ...]:
    """Returns the biases. Raises BadInput for tensors that combine cannot use."""
    import torch

    num_rows = len(parts.recv_src_meta)
    check_tensor(comm, "x", x, torch.bfloat16, (num_rows, layout.hidden))
    check_aligned("x", x)
    if topk_weights is not None:
        check_tensor(comm, "topk_weights", topk_weights, torch.float32, (num_rows, layout.topk))
    biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    if len(biases) > 2:
        raise BadInput(f"{len(biases)} biases; wanted at most two")
    for one in biases:
        check_tensor(comm, "bias", one, torch.bfloat16, (len(parts.is_token_in_rank), layout.hidden))
        check_aligned("bias", one)
    return biases


def check_experts(
    comm: Communicator, layout: Layout | None, recv_x: Any, recv_topk_idx: Any, recv_topk_weights: Any, experts: Any
) -> torch.Tensor:
    """Returns the choices as int32. Raises BadInput for rows of a dispatch or experts that kernels cannot use."""
    import torch

    if not isinstance(experts, Int4Experts):
        raise BadInput(f"experts is {type(experts).__name__}; wanted Int4Experts")
    if layout is None:
        raise BadInput("nothing was dispatched; experts take the rows of a dispatch")
    require_tensor("recv_x", recv_x)
    num_rows = int(recv_x.shape[0]) if recv_x.ndim == 2 else -1
    check_tensor(comm, "recv_x", recv_x, torch.bfloat16, (num_rows, layout.hidden))
    check_aligned("recv_x", recv_x)
    check_tensor(comm, "recv_topk_idx", recv_topk_idx, torch.int64, (num_rows, layout.topk))
    check_tensor(comm, "recv_topk_weights", recv_topk_weights, torch.float32, (num_rows, layout.topk))
    num_ranks = comm.group.num_ranks
    experts.check(comm, MoeShape(num_ranks, 1, layout.num_experts, layout.topk, layout.hidden, "bf16"))
    return gemm_checks.int32_choices(recv_topk_idx, num_rows, layout.num_experts // num_ranks, recv_x)


def _check_x(comm: Communicator, x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the values and their scales, if they have some."""
    import torch

    values, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
    require_tensor("x", values)
    size = tuple(values.shape) if values.ndim == 2 else (-1, -1)
    if scales is None:
        check_tensor(comm, "x", values, torch.bfloat16, size)
    else:
        check_tensor(comm, "x[0]", values, torch.float8_e4m3fn, size)
        if size[1] % SCALE_GROUP:
            raise BadInput(f"hidden is {size[1]}; fp8 has a scale for {SCALE_GROUP} values: wanted a multiple")
        check_tensor(comm, "x[1]", scales, torch.float32, (size[0], size[1] // SCALE_GROUP))
    if size[1] % 8 or not 8 <= size[1] <= 1 << 20:
        raise BadInput(f"hidden is {size[1]}; wanted a multiple of 8, which are 16 bytes of bf16, up to {1 << 20}")
    check_aligned("x", values)
    return values, scales


def _check_choices(comm: Communicator, num_tokens: int, topk_idx: Any, topk_weights: Any) -> int:
    """Returns the top-k; 0 if tokens come without experts and weights."""
    import torch

    if (topk_idx is None) != (topk_weights is None):
        raise BadInput("one of topk_idx and topk_weights is missing; give both or none")
    if topk_idx is None:
        return 0
    check_topk_idx(comm, topk_idx)
    topk = int(topk_idx.shape[1])
    check_tensor(comm, "topk_idx", topk_idx, torch.int64, (num_tokens, topk))
    check_tensor(comm, "topk_weights", topk_weights, torch.float32, (num_tokens, topk))
    return topk


def check_topk_idx(comm: Communicator, topk_idx: Any) -> None:
    """Raises BadInput for what are no choices."""
    import torch

    require_tensor("topk_idx", topk_idx)
    if topk_idx.ndim != 2:
        raise BadInput(f"topk_idx is {describe_tensor(topk_idx)}; wanted int64 [num_tokens, topk]")
    check_tensor(comm, "topk_idx", topk_idx, torch.int64, tuple(topk_idx.shape))
    check_range("top-k", int(topk_idx.shape[1]), 1, MAX_TOPK)


def _check_belongs(given: Given, nodes: Nodes, num_experts: int) -> None:
    """Raises BadInput for counts that are not those of is_token_in_rank, and for choices that are not either."""
    in_rank = given.is_token_in_rank
    for name, counts, wanted in (
        ("num_tokens_per_rank", given.num_tokens_per_rank, in_rank.sum(0)),
        ("num_tokens_per_rdma_rank", given.num_tokens_per_rdma_rank, is_token_in_node(in_rank, nodes).sum(0)),
    ):
        wrong = (counts != wanted).nonzero()
        if len(wrong):
            i = int(wrong[0])
            told = f"{name}[{i}] is {int(counts[i])}; is_token_in_rank has {int(wanted[i])} tokens there"
            raise BadInput(f"{told}: take both from one get_dispatch_layout()")
    if given.topk_idx is None:
        return
    strange = (given.topk_idx < -1) | (given.topk_idx >= num_experts)
    if strange.any():
        token, choice = strange.nonzero()[0].tolist()
        expert = int(given.topk_idx[token, choice])
        raise BadInput(f"topk_idx[{token}, {choice}] is expert {expert}; wanted -1 (none) or 0 to {num_experts - 1}")
    of_experts = given.topk_idx[given.topk_idx >= 0].bincount(minlength=num_experts)
    wrong = (given.num_tokens_per_expert != of_experts).nonzero()
    if len(wrong):
        i = int(wrong[0])
        told = f"num_tokens_per_expert[{i}] is {int(given.num_tokens_per_expert[i])}; topk_idx names it"
        raise BadInput(f"{told} {int(of_experts[i])} times: take both from one get_dispatch_layout()")
