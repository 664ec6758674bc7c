"""DeepEP's Buffer for prefill and decoding: the calls of two_hop and of low_latency on one communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracekern.errors import BadInput
from tracekern.moe import low_latency, two_hop
from tracekern.moe.calls.deepep import check_flag
from tracekern.moe.calls.launch_order import HeapPart

if TYPE_CHECKING:
    from tracekern.comm.ranks.group import Group


class Buffer(two_hop.Buffer):
    """The Buffer of two_hop, with low_latency_mode=True that of low_latency beside it.

    Each has its own part of one heap, so ranks go from one kind of calls to the other whenever they like, with handles
    of both kinds alive, and nothing is cleaned in between. Kernels run one after the other, whichever call started
    them. All ranks make all calls in the same order.
    """

    def __init__(
        self,
        group: Group | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        *,
        num_nodes: int | None = None,
        num_max_tokens_per_rank: int = 4096,
        backend: str = "cuda",
        timeout_s: float = 10.0,
        on_timeout: str = "raise",
        num_sms: int = 0,
        num_max_warp_groups: int = 0,
        executor: str = "fibers",
    ) -> None:
        """num_rdma_bytes: as in DeepEP the larger of what both kinds of calls need, of each rank's part of the heap.
        With low_latency_mode it is there twice, once for each.

        num_sms, num_max_warp_groups: of low latency kernels. The rest: see two_hop.Buffer. Collective. Raises BadInput.
        """
        check_flag("low_latency_mode", low_latency_mode)
        how: dict[str, Any] = {"backend": backend, "timeout_s": timeout_s, "on_timeout": on_timeout}
        super().__init__(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            False,
            num_qps_per_rank,
            num_nodes=num_nodes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            executor=executor,
            num_bytes_behind=num_rdma_bytes if low_latency_mode else 0,
            **how,
        )
        self._low_latency: low_latency.Buffer | None = None
        if low_latency_mode:
            self._low_latency = low_latency.Buffer(
                self.group,
                num_rdma_bytes=num_rdma_bytes,
                num_sms=num_sms,
                num_max_warp_groups=num_max_warp_groups,
                executor=executor,
                heap=HeapPart(self.comm, self._heap.order, self._num_bytes),
                **how,
            )

    get_low_latency_rdma_size_hint = staticmethod(low_latency.Buffer.get_low_latency_rdma_size_hint)

    @property
    def low_latency(self) -> low_latency.Buffer:
        """The Buffer of low_latency calls, of which those of DeepEP are below. Raises BadInput if there is none."""
        if self._low_latency is None:
            raise BadInput("low_latency_mode is False; make the Buffer with low_latency_mode=True for such calls")
        return self._low_latency

    @property
    def low_latency_dispatch(self) -> Callable[..., Any]:
        return self.low_latency.low_latency_dispatch

    @property
    def low_latency_combine(self) -> Callable[..., Any]:
        return self.low_latency.low_latency_combine

    @property
    def get_next_low_latency_combine_buffer(self) -> Callable[..., Any]:
        return self.low_latency.get_next_low_latency_combine_buffer

    @property
    def clean_low_latency_buffer(self) -> Callable[..., Any]:
        return self.low_latency.clean_low_latency_buffer

    def synchronize(self) -> None:
        """Waits until this rank's kernels have finished. Raises what synchronize() of both kinds does."""
        super().synchronize()
        if self._low_latency is not None:
            self._low_latency.synchronize()

    def destroy(self) -> None:
        """Ends the use of the buffer. Raises BadInput while a receive hook has not been called."""
        if self._low_latency is not None:
            self._low_latency.destroy()
        super().destroy()
