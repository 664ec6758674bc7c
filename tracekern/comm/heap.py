"""The symmetric heap of the CPU backend: each rank's part is shared memory that all others map.

It has no name in /dev/shm, so nothing is left behind, whatever happens to the ranks.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tracekern.comm.descriptors import exchange_descriptors
from tracekern.comm.ranks.group import MAX_HEAP_RANKS, Group
from tracekern.comm.ranks.node import descriptor_reach
from tracekern.errors import BadInput
from tracekern.segment.names import SHM_DIR


class SymmetricHeap:
    """Shared memory of the ranks of a host. Rank r's part is `maps[r]`, bytes that begin at `addresses[r]` here; it is
    not there, and its address 0, where r is on another host. Collective."""

    def __init__(self, group: Group, num_bytes: int, hosts: Sequence[int] | None = None) -> None:
        """num_bytes: size of one rank's part, the same on every rank. hosts: of each rank the number of its host; None:
        all are on one. Raises BadInput naming two ranks that differ."""
        self.num_bytes = num_bytes
        offer = Offer(platform.node(), descriptor_reach(), num_bytes)
        offers = group.all_gather(offer, "the making of a heap")
        if refused := refusal([Offer(*offered) for offered in offers], group.world_ranks):
            raise BadInput(refused)
        own, problem = _allocate(num_bytes)
        parts = {group.rank: own}
        try:
            group.refuse_together(problem and f"symmetric heap of rank {group.world_rank}: {problem}")
            others = [peer for peer in range(group.num_ranks) if not hosts or hosts[peer] == hosts[group.rank]]
            parts |= exchange_descriptors(group, lambda: os.dup(own), num_bytes, others)
            self.maps = {rank: np.frombuffer(mmap.mmap(part, num_bytes), np.uint8) for rank, part in parts.items()}
        finally:
            for descriptor in parts.values():
                os.close(descriptor)
        ranks = range(group.num_ranks)
        self.addresses = [int(self.maps[rank].ctypes.data) if rank in self.maps else 0 for rank in ranks]


class Offer(NamedTuple):
    """A rank's part of a heap."""

    node: str
    """Name of its host."""
    reach: str
    """Equal for ranks that can hand each other memory."""
    num_bytes: int


def refusal(offers: Sequence[Offer], ranks: Sequence[int]) -> str:
    """Returns why ranks cannot share a heap; "" if they can. offers: of each rank. ranks: what the run calls them."""
    if len(offers) > MAX_HEAP_RANKS:
        return f"symmetric heap: {len(offers)} ranks, wanted at most {MAX_HEAP_RANKS}; start fewer"
    first = offers[0]
    for rank, own in zip(ranks, offers, strict=True):
        if own.num_bytes != first.num_bytes:
            return (
                f"symmetric heap: rank {ranks[0]} asks for {first.num_bytes} bytes, rank {rank} for {own.num_bytes}; "
                "every rank must use the same shape"
            )
        if own.reach != first.reach:
            where = f"rank {rank} on {own.node}"
            if own.node == first.node:
                where = f"rank {rank} on another machine or in a container with a network of its own"
            who = f"rank {ranks[0]} is on {first.node}, {where}"
            return f"symmetric heap: {who}; these kernels reach the ranks of one node only"
    return ""


def _allocate(num_bytes: int) -> tuple[int, str]:
    """Returns the descriptor of a file without a name, and why it cannot be as large as asked for; "" if it is.

    A full /dev/shm is found here and does not raise SIGBUS in a kernel.
    """
    descriptor = os.open(SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        what = f"{num_bytes} bytes of shared memory: {error.strerror}"
        return descriptor, f"{what}; make {SHM_DIR} larger (docker run --shm-size=1g) or the shape smaller"
    return descriptor, ""
