"""What a two-hop call is made for: DeepEP's Config, and the layout of the heap that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracekern.errors import BadInput
from tracekern.moe.calls.native import NativeFamily
from tracekern.moe.shape import MAX_EXPERTS, check_range
from tracekern.moe.two_hop.layout import Nodes

FACTS = NativeFamily("two_hop")
SCALE_GROUP = 128
"""Neighbouring values of an fp8 row that share a scale."""
MAX_TOPK = 128
MAX_CHANNELS = 64
LINE_BYTES = 128
"""Parts of the heap are multiples of it."""
MAX_SLOTS = (1 << 14) - 1
"""Most slots of a ring: the events have 14 bits for one."""
NODE_PEERS = 8
"""Ranks of a node where nobody says how many there are, as in DeepEP."""
FAULT_SLOTS = dict.fromkeys(
    (
        *("meta", "tail", "head", "prefix", "peer_tail", "peer_head", "return_tail", "return_head"),
        *("lock", "ready", "forwarded", "summed", "reduced", "sent", "received", "returned"),
    ),
    "of dispatch channel",
)
"""Channel -> what the slot of a fault record is."""
FAULT_VALUES = dict.fromkeys(
    (
        *("tail", "head", "peer_tail", "peer_head", "return_tail", "return_head"),
        *("ready", "forwarded", "summed", "reduced", "sent", "received", "returned"),
    ),
    "token",
)
"""Channel -> what the values of its flags count."""
REFUSALS = {
    "other_call": "ranks {rank} and {peer} make different calls, or give handles of different dispatches; make the "
    "same calls on all ranks, with handles of the same dispatch",
    "overflow": "rank {rank}: {number} tokens came, to stay or to be forwarded, and num_worst_tokens was less; the "
    "rest is lost: give at least {number}",
    "out_of_bounds": "rank {rank}: a handle has numbers that no dispatch wrote; give it as dispatch() returned it",
}
"""Why kernels refuse a call -> what is raised on all ranks."""


def peer_warps(nodes: Nodes, backend: str) -> int:
    """Returns the warps of a block for each peer: as many as there may be, on the CPU no more than it takes."""
    most: int = FACTS.max_warps - FACTS.num_senders - 1
    least = max(1, -(-(nodes.num_nodes - FACTS.num_senders - 1) // nodes.peers))
    return least if backend == "cpu" else most // nodes.peers


def block_warps(nodes: Nodes, backend: str) -> int:
    """Returns the warps of a block of dispatch or combine."""
    return int(FACTS.warps(nodes.num_nodes, nodes.peers, peer_warps(nodes, backend)))


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning of a dispatch. Raises BadInput for numbers that the kernels cannot work with."""

    num_sms: int = 20
    """Blocks of a kernel, two for each channel."""
    num_max_nvl_chunked_send_tokens: int = 6
    """Rows that a peer is told of at a time, at least."""
    num_max_nvl_chunked_recv_tokens: int = 256
    """Slots of a ring within a node."""
    num_max_rdma_chunked_send_tokens: int = 6
    """Tokens that go to another node at a time."""
    num_max_rdma_chunked_recv_tokens: int = 258
    """Slots of a ring between nodes, a multiple of its chunk."""

    def __post_init__(self) -> None:
        check_range("num_sms", self.num_sms, 2, 2 * MAX_CHANNELS)
        if self.num_sms % 2:
            raise BadInput(f"num_sms is {self.num_sms}; wanted an even number, since a channel has two blocks")
        nvl_send, nvl_recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        rdma_send, rdma_recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        for name in (
            "num_max_nvl_chunked_send_tokens",
            "num_max_nvl_chunked_recv_tokens",
            "num_max_rdma_chunked_send_tokens",
            "num_max_rdma_chunked_recv_tokens",
        ):
            check_range(name, getattr(self, name), 1, MAX_SLOTS)
        if nvl_recv < nvl_send:
            raise BadInput(
                f"num_max_nvl_chunked_recv_tokens is {nvl_recv}; wanted at least num_max_nvl_chunked_send_tokens, "
                f"{nvl_send}: there has to be room for a chunk"
            )
        least = FACTS.least_rdma_slots(rdma_send)
        if rdma_recv < least:
            raise BadInput(
                f"num_max_rdma_chunked_recv_tokens is {rdma_recv}; wanted at least {least}, "
                f"num_max_rdma_chunked_send_tokens + {FACTS.num_senders - 1}: with fewer slots the "
                f"{FACTS.num_senders} senders of a channel can wait for each other for good; take "
                f"{whole_chunks(least, rdma_send)}"
            )
        if rdma_recv % rdma_send:
            raise BadInput(
                f"num_max_rdma_chunked_recv_tokens is {rdma_recv}; wanted a multiple of "
                f"num_max_rdma_chunked_send_tokens, {rdma_send}: no chunk crosses the end of a ring; take "
                f"{whole_chunks(rdma_recv, rdma_send)}"
            )

    @property
    def num_channels(self) -> int:
        return self.num_sms // 2

    def native(self) -> dict[str, int]:
        """Returns the options of the native functions."""
        return {
            "channels": self.num_channels,
            "nvl_send": self.num_max_nvl_chunked_send_tokens,
            "nvl_recv": self.num_max_nvl_chunked_recv_tokens,
            "rdma_send": self.num_max_rdma_chunked_send_tokens,
            "rdma_recv": self.num_max_rdma_chunked_recv_tokens,
        }

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, num_nodes: int = 0) -> int:
        """Returns the bytes that rings within a node take of a rank's part of the heap.

        hidden_bytes: of a token, 2 * hidden for bf16, which is enough for fp8 and its scales, too. num_nodes: 0: nodes
        of 8 ranks, as in DeepEP. The hint is for any top-k up to 128, so that a call may need less.
        """
        nodes, row = self._nodes_and_row(hidden_bytes, num_ranks, num_nodes)
        slots = nodes.num_nodes * FACTS.part_slots(self.num_max_nvl_chunked_recv_tokens, nodes.num_nodes)
        return self.num_channels * nodes.peers * whole_chunks(slots * row, LINE_BYTES)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, num_nodes: int = 0) -> int:
        """Returns the bytes of all else: rings between nodes, counts and flags. Arguments as for the other hint."""
        nodes, _ = self._nodes_and_row(hidden_bytes, num_ranks, num_nodes)
        experts = max(1, MAX_EXPERTS // num_ranks) * num_ranks
        largest = Layout(experts, MAX_TOPK, _rounded(hidden_bytes), True, self)
        return largest.heap_bytes(nodes, 1) - self.get_nvl_buffer_size_hint(hidden_bytes, num_ranks, num_nodes)

    def _nodes_and_row(self, hidden_bytes: int, num_ranks: int, num_nodes: int) -> tuple[Nodes, int]:
        """Returns the nodes, and the bytes of the largest row."""
        check_range("hidden_bytes", hidden_bytes, 1, 1 << 21)
        check_range("num_ranks", num_ranks, 1, MAX_EXPERTS)
        nodes = Nodes.of(num_ranks, num_nodes or max(1, num_ranks // NODE_PEERS))
        values = _rounded(hidden_bytes)
        return nodes, FACTS.row_bytes(values, num_places(nodes), values // SCALE_GROUP, MAX_TOPK)


def whole_chunks(tokens: int, chunk: int) -> int:
    """Returns the least number of slots for so many tokens that is a multiple of the chunk."""
    return -(-tokens // chunk) * chunk


def num_places(nodes: Nodes) -> int:
    """Returns the places that a token has with it on its way to another node."""
    return 0 if nodes.num_nodes == 1 else nodes.peers


def _rounded(hidden_bytes: int) -> int:
    return whole_chunks(hidden_bytes, SCALE_GROUP)


_NVL_AND_RDMA = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
"""Ranks -> what DeepEP recommends for them, Config without its SMs."""


def recommended_config(num_ranks: int, num_sms: int) -> Config:
    """Returns DeepEP's recommendation for so many ranks, or for the next number that it has one for.

    Rings between nodes are rounded up to whole chunks.
    """
    known = min((ranks for ranks in _NVL_AND_RDMA if ranks >= num_ranks), default=max(_NVL_AND_RDMA))
    nvl_send, nvl_recv, rdma_send, rdma_recv = _NVL_AND_RDMA[known]
    return Config(num_sms, nvl_send, nvl_recv, rdma_send, whole_chunks(rdma_recv, rdma_send))


@dataclass(frozen=True)
class Layout:
    """What offsets in the heap follow from, besides the nodes. Ranks may not differ in it."""

    num_experts: int
    topk: int
    """0: tokens come without experts and weights."""
    hidden: int
    is_fp8: bool
    config: Config

    def native(self, nodes: Nodes, max_tokens: int, backend: str) -> dict[str, Any]:
        """Returns the options of the native functions."""
        return {
            "variant": "two_hop",
            "dtype": "bf16",
            "max_tokens": max_tokens,
            "num_experts": self.num_experts,
            "hidden": self.hidden,
            "topk": self.topk,
            "num_nodes": nodes.num_nodes,
            "fp8": int(self.is_fp8),
            "peer_warps": peer_warps(nodes, backend),
            **self.config.native(),
        }

    def heap_bytes(self, nodes: Nodes, max_tokens: int) -> int:
        options = self.native(nodes, max_tokens, "cpu")  # on a GPU it is as large
        return int(FACTS.heap_bytes(num_ranks=nodes.num_ranks, **options))

    @property
    def num_scales(self) -> int:
        """Scales of a row."""
        return self.hidden // SCALE_GROUP if self.is_fp8 else 0

    def row_bytes(self, nodes: Nodes) -> int:
        """Returns the bytes of a token as it travels."""
        values = self.hidden * (1 if self.is_fp8 else 2)
        return int(FACTS.row_bytes(values, num_places(nodes), self.num_scales, self.topk))

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a token as it travels back."""
        return int(FACTS.row_bytes(self.hidden * 2, 0, 0, self.topk))

    def __str__(self) -> str:
        kind = "fp8" if self.is_fp8 else "bf16"
        return f"{self.num_experts} experts, top-k {self.topk}, hidden {self.hidden} in {kind}, {self.config}"
