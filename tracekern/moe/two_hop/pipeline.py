"""Two-hop dispatch, experts and combine as one call: what `tracekern run moe` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.calls.pipeline import SPARE_SMS
from tracekern.moe.experts import Experts
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.routing import Batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.two_hop.buffer import Buffer
from tracekern.moe.two_hop.handle import Received
from tracekern.moe.two_hop.kernels import STAGES
from tracekern.moe.two_hop.layout import MAX_NODES, NODE_SIZES, Nodes
from tracekern.moe.two_hop.reference import (
    count_wrong,
    expert_rows,
    node_reduced_reference,
    num_different,
    received_reference,
)
from tracekern.moe.two_hop.settings import (
    FACTS,
    MAX_CHANNELS,
    MAX_SLOTS,
    Config,
    Layout,
    block_warps,
    peer_warps,
    recommended_config,
)

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

CPU_CHANNELS = 2
GPU_CHANNELS = 10
"""DeepEP's, where there is room for as many."""
RINGS = {
    "nvl_send": "num_max_nvl_chunked_send_tokens",
    "nvl_recv": "num_max_nvl_chunked_recv_tokens",
    "rdma_send": "num_max_rdma_chunked_send_tokens",
    "rdma_recv": "num_max_rdma_chunked_recv_tokens",
}
"""Option of a run -> its name in Config."""
HIGHEST = {"nodes": MAX_NODES, "channels": MAX_CHANNELS, **dict.fromkeys(RINGS, MAX_SLOTS)}
"""Option of a run -> its largest value."""


@dataclass(frozen=True)
class Carried:
    """What a call carried: there, and back."""

    received: Received
    combined: torch.Tensor
    """[num_tokens, hidden] bf16."""


class TwoHopPipeline:
    """Layout -> dispatch -> experts -> combine through a Buffer of its own, with the interface of other families'
    pipelines. Experts are int4 kernels, or a stand-in in plain torch: reference.expert_rows().
    """

    stages = STAGES

    def __init__(
        self,
        group: Group,
        shape: MoeShape,
        variant: str = "two_hop",
        *,
        timeout_s: float = 10.0,
        on_timeout: str = "raise",
        num_blocks: int = 0,
        warps_per_block: int = 0,
        executor: str = "fibers",
        backend: str = "cpu",
        is_queued: bool = False,
        **options: int,
    ) -> None:
        """num_blocks: two for each channel. warps_per_block: taken for others' sake, the roles say how many there are.

        is_queued: whether calls bring memory for the most rows, since no host waits for their counts.
        options: those of HIGHEST; 0: see chosen_options(). Collective. Raises BadInput.
        """

        def check() -> dict[str, Any]:
            if variant != "two_hop":
                raise BadInput(f"variant is {variant!r}; wanted two_hop")
            given = dict.fromkeys(HIGHEST, 0) | options
            if num_blocks and given["channels"] not in (0, num_blocks / 2):
                raise BadInput(f"blocks is {num_blocks} and channels {given['channels']}; a channel has two blocks")
            if num_blocks % 2:
                raise BadInput(f"blocks is {num_blocks}; wanted an even number, since a channel has two blocks")
            given["channels"] = given["channels"] or num_blocks // 2 or _default_channels(group, backend)
            if why := why_unsuitable(shape, given):
                raise BadInput(why)
            return {**dataclasses.asdict(shape), "options": chosen_options(shape, given)}

        self.options: dict[str, int] = group.agree("the making of a TwoHopPipeline", check)["options"]
        self.shape, self.variant = shape, variant
        self._num_worst_tokens = shape.num_ranks * shape.max_tokens if is_queued else 0
        self.config, nodes = config_of(self.options), Nodes.of(shape.num_ranks, self.options["nodes"])
        self.buffer = Buffer(
            group,
            num_rdma_bytes=_layout_of(shape, self.config).heap_bytes(nodes, shape.max_tokens),
            num_nodes=nodes.num_nodes,
            num_max_tokens_per_rank=shape.max_tokens,
            backend=backend,
            timeout_s=timeout_s,
            on_timeout=on_timeout,
            executor=executor,
        )
        self.comm, self.grid, self.warps = self.buffer.comm, self.config.num_sms, block_warps(nodes, backend)
        self._open()

    def _open(self) -> None:
        """Makes the kernels ready: a call without tokens."""
        import torch

        device = self.comm.device.torch_device
        none = torch.empty((0, self.shape.hidden), dtype=torch.bfloat16, device=device)
        chosen = torch.empty((0, self.shape.topk), dtype=torch.int64, device=device)
        received = self._dispatch(none, chosen, chosen.float(), None, None)
        self.buffer.combine(received.recv_x, received.handle)
        self.synchronize()
        self.reset()  # calls are counted from the first one with tokens

    @property
    def late_us(self) -> int:
        """How much later than its host this rank's next calls begin, to see how the others wait."""
        return self.buffer.late_us

    @late_us.setter
    def late_us(self, late_us: int) -> None:
        self.buffer.late_us = late_us

    def __call__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Experts,
        *,
        out: torch.Tensor | None = None,
        capture: Capture | None = None,
        after_stage: Callable[[str], None] | None = None,
    ) -> Carried:
        """Returns what this rank received, and what came back. Arguments as those of moe.calls.pipeline.Pipeline;
        `out` is None.
        """
        received = self._dispatch(x, topk_idx.long(), topk_weights, capture, after_stage)
        assert received.recv_topk_idx is not None
        assert received.recv_topk_weights is not None
        come = received.recv_x, received.recv_topk_idx, received.recv_topk_weights
        if isinstance(experts, Int4Experts):
            rows = self.buffer.apply_experts(*come, experts, capture=capture, after_stage=after_stage)
        else:
            num_local = self.shape.num_local_experts
            rows = expert_rows(*come, experts.scale[self.comm.group.rank * num_local :][:num_local])
        combined, _, _ = self.buffer.combine(rows, received.handle, capture=capture, after_stage=after_stage)
        return Carried(received, combined)

    def _dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        capture: Capture | None,
        after_stage: Callable[[str], None] | None,
    ) -> Received:
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, self.shape.num_experts)
        recv_x, recv_topk_idx, recv_topk_weights, counts, handle, _ = self.buffer.dispatch(
            x,
            None,
            per_rank,
            per_node,
            in_rank,
            per_expert,
            topk_idx,
            topk_weights,
            num_worst_tokens=self._num_worst_tokens,
            config=self.config,
            capture=capture,
            after_stage=after_stage,
        )
        return Received(recv_x, None, recv_topk_idx, recv_topk_weights, counts, handle)

    def synchronize(self) -> None:
        """Waits until this rank's calls have finished. Raises CommTimeout and BadInput, see Buffer.synchronize()."""
        self.buffer.synchronize()

    def reset(self) -> None:
        """Collective: makes the communicator usable again after a CommTimeout."""
        self.buffer.reset()


def chosen_options(shape: MoeShape, options: dict[str, int]) -> dict[str, int]:
    """Returns the options with what 0 stands for: two nodes or as many more as it takes for 8 ranks in each,
    CPU_CHANNELS, and the rings that DeepEP recommends for so many ranks. Raises BadInput.
    """
    given = dict.fromkeys(HIGHEST, 0) | options
    ranks = shape.num_ranks
    fits = [nodes for nodes in range(2, ranks + 1) if ranks % nodes == 0 and ranks // nodes in NODE_SIZES]
    usual = recommended_config(ranks, 2)
    rings = {name: given[name] or int(getattr(usual, field)) for name, field in RINGS.items()}
    if given["rdma_send"] and not given["rdma_recv"]:  # as many tokens as usual, in whole chunks
        chunk = given["rdma_send"]
        rings["rdma_recv"] = -(-max(rings["rdma_recv"], FACTS.least_rdma_slots(chunk)) // chunk) * chunk
    return {
        "nodes": given["nodes"] or min(fits, default=1),
        "channels": given["channels"] or CPU_CHANNELS,
        **rings,
    }


def config_of(options: dict[str, int]) -> Config:
    """Returns the Config of chosen options. Raises BadInput, with the names of the options."""
    try:
        return Config(2 * options["channels"], **{field: options[name] for name, field in RINGS.items()})
    except BadInput as error:
        text = str(error)
        for name, field in RINGS.items():
            text = text.replace(field, name.replace("_", "-"))
        raise BadInput(text) from None


def why_unsuitable(shape: MoeShape, options: dict[str, int]) -> str:
    """Returns why the kernels do not take the shape with these options; "" if they do."""
    if shape.dtype != "bf16":
        return f"dtype is {shape.dtype}; variant two_hop takes bf16"
    if shape.hidden % 8:
        return f"hidden is {shape.hidden}; variant two_hop takes a multiple of 8"
    try:
        chosen = chosen_options(shape, options)
        Nodes.of(shape.num_ranks, chosen["nodes"])
        config_of(chosen)
    except BadInput as error:
        return str(error)
    most = (FACTS.max_tokens - MAX_SLOTS) // shape.num_ranks
    if shape.max_tokens > most:
        return f"tokens is {shape.max_tokens}; variant two_hop takes at most {most} with {shape.num_ranks} ranks"
    return ""


def heap_options(shape: MoeShape, options: dict[str, int]) -> dict[str, int]:
    """Returns the native options that the size of the heap follows from."""
    chosen = chosen_options(shape, options)
    nodes = Nodes.of(shape.num_ranks, chosen["nodes"])
    return {
        "num_nodes": nodes.num_nodes,
        "fp8": 0,
        "peer_warps": peer_warps(nodes, "cpu"),  # the heap is as large on a GPU
        **config_of(chosen).native(),
    }


def tensor_bytes(shape: MoeShape) -> int:
    """Returns the bytes of what a rank receives at most."""
    layout = _layout_of(shape, recommended_config(shape.num_ranks, 2))
    return shape.num_ranks * shape.max_tokens * layout.combine_row_bytes


def count_wrong_elements(
    carried: Carried,
    batches: Sequence[Batch],
    rank: int,
    experts: Experts,
    shape: MoeShape,
    options: dict[str, int],
) -> int:
    """Returns how many elements of what a rank received differ from received_reference(), and of what came back from
    node_reduced_reference(). batches: of all ranks. experts: on the device where the latter is computed.
    """
    nodes = Nodes.of(shape.num_ranks, options["nodes"])
    received, own = carried.received.what_came(), batches[rank].to(str(experts.scale.device))
    came_back = node_reduced_reference(own.x, own.topk_idx.long(), own.topk_weights, experts, nodes)
    wanted = received_reference(
        [batch.x for batch in batches],
        None,
        [batch.topk_idx.long() for batch in batches],
        [batch.topk_weights for batch in batches],
        nodes,
        shape.num_experts,
        options["channels"],
        rank,
    )
    if not received.num_recv_tokens_per_expert_list:  # no host has waited for them
        wanted = dataclasses.replace(wanted, num_recv_tokens_per_expert_list=[])
    return count_wrong(received, wanted) + num_different(carried.combined, came_back)


def _layout_of(shape: MoeShape, config: Config) -> Layout:
    return Layout(shape.num_experts, shape.topk, shape.hidden, False, config)


def _default_channels(group: Group, backend: str) -> int:
    """Returns the channels that suit this machine: on a GPU resident ranks get an equal part of the SMs each."""
    if backend == "cpu":
        return CPU_CHANNELS
    import torch

    # Where there is no GPU the communicator says so.
    has_gpu = torch.cuda.is_available()
    present = torch.cuda.get_device_properties().multi_processor_count if has_gpu else 132
    return max(1, min(GPU_CHANNELS, (present - SPARE_SMS) // group.num_residents // 2))
