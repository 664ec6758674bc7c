"""Reaches ranks of other hosts: a proxy of this rank, which writes over a network what its kernels ask for."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, NotBuilt
from tracekern.host_clock import anchor

_NET = "TRACEKERN_NET"
"""The variable that names the interface of proxies, PROVIDER or PROVIDER:SOURCE."""
_DEFAULT = "tcp"
_RECORDS = 1 << 19
"""Room of a proxy's track; a put takes two. What nobody writes takes no memory."""


class Network:
    """A rank's way to ranks of other hosts. Made by all ranks of a communicator together, before any kernel.

    Raises BadInput, the same on all ranks, where there is no such network.
    """

    def __init__(self, group: Group, comm: Any, heap: Any, far_bytes: int, hosts: Sequence[int], backend: str) -> None:
        """comm: the rank's native communicator, over `heap`. far_bytes: of what others write here, and what is staged.
        hosts: of each rank the number of its host. backend: of the kernels."""
        self._native: Any
        self._on_gpu: Any = None
        with _refusing_together(group):
            self._native = _open(comm.args_address, far_bytes, (comm, heap))
            if backend == "cuda":
                self._on_gpu = _map_for_gpu(self._native)
        addresses = group.all_gather(self._native.address, "the addresses of proxies")
        with _refusing_together(group):
            for peer, address in enumerate(addresses):
                if hosts[peer] != hosts[group.rank]:
                    self._native.meet(peer, *address)
        with _refusing_together(group):
            if not self._native.knows_peers():
                raise RuntimeError(_why_unknown())
        comm.reach_by(self.ring, self.far_heap)
        self._native.start()
        self._recorded_by: Callable[[], Any] = lambda: None
        weakref.finalize(self, self._native.leave)  # also where the process ends first: peers would take it for lost

    @property
    def ring(self) -> int:
        """Address of the ring of commands that kernels fill."""
        return int((self._on_gpu or self._native).ring)

    @property
    def far_heap(self) -> int:
        """Address of what ranks of other hosts write: laid out like the heap, and as much again for what is staged."""
        return int(self._native.far_heap)

    @property
    def max_bytes(self) -> int:
        """The most that is written as one."""
        return int(self._native.max_bytes)

    def why_ended(self) -> str:
        """Returns why the proxy has ended; "" while it has not."""
        return str(self._native.error)

    def set_late(self, us: int) -> None:
        """Has the proxy pause for so long before each turn from now on, to see how others wait."""
        self._native.set_late(us)

    def record(self, capture: Any) -> None:
        """Records the proxy's puts until the capture closes. Another call for the same capture does nothing."""
        if self._recorded_by() is capture or not capture.keeps_host_tracks:
            return
        from tracekern.fabric.library import native

        self._recorded_by = weakref.ref(capture)
        native().anchor_host_time(anchor().ns)
        events, stop = native().describe_events(), self._native.stop_trace
        if tracks := capture.host_tracks("proxy", events, native().proxy_tracks, _RECORDS, stop):
            self._native.start_trace(tracks)

    def reset(self, inbox: Any = None) -> None:
        """Sets the proxy back to the state before any command. Collective, with all ranks' kernels finished, and none
        begun before all ranks have done it. inbox: of the native kernels that ranks of other hosts write to; None: the
        communicator's own words are set back, too."""
        self._native.reset(inbox)
        if self._on_gpu:
            self._on_gpu.reset()


def check_hosts(hosts: Any, num_ranks: int) -> list[int] | None:
    """Returns the hosts of ranks as numbers; None where all are on one. Raises BadInput."""
    if hosts is None:
        return None
    is_table = isinstance(hosts, Sequence) and len(hosts) == num_ranks
    if not is_table or any(isinstance(host, bool) or not isinstance(host, int) for host in hosts):
        raise BadInput(f"hosts is {hosts!r}; wanted a number for each of {num_ranks} ranks")
    return list(hosts) if len(set(hosts)) > 1 else None


@contextlib.contextmanager
def _refusing_together(group: Group) -> Iterator[None]:
    problem = ""
    try:
        yield
    except (NotBuilt, RuntimeError, MemoryError) as error:
        problem = f"rank {group.world_rank}: network: {error or 'out of memory'}"
    group.refuse_together(problem)


def _open(comm_args: int, far_bytes: int, owner: Any) -> Any:
    from tracekern.fabric.library import native, require_library

    provider, source = _provider_and_source()
    made = native().RankProxy(require_library(), provider, source, comm_args, far_bytes, owner)
    if not made.tells_sources:
        raise RuntimeError(_why_unknown())
    return made


def _provider_and_source() -> tuple[str, str]:
    provider, _, source = os.environ.get(_NET, _DEFAULT).partition(":")
    return provider, source


def _why_unknown() -> str:
    """Why a peer is not who it says."""
    from tracekern.fabric.library import native, require_library

    return (
        f"provider {_provider_and_source()[0]} of libfabric {native().library_version(require_library())} does not "
        "tell who a write is from; take a newer one: python -m pip install mpich==5.0.2"
    )


def _map_for_gpu(proxy: Any) -> Any:
    from tracekern import _cuda

    return _cuda.ProxyMemory(proxy.ring, proxy.far_heap, proxy.num_bytes, proxy)
