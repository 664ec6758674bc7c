"""The symmetric heap of the CPU backend: each rank's part is POSIX shared memory that all others map.

The names are gone as soon as everybody has mapped everything, so nothing is left behind whatever happens to the ranks.
"""

from __future__ import annotations

import mmap
import os
import secrets

import numpy as np

from tracekern.errors import BadInput
from tracekern.record.group import Group, host_identity
from tracekern.record.segment_names import SHM_DIR


class SymmetricHeap:
    """`addresses[peer]`: where that rank's part begins in this process. Collective: all ranks make one."""

    def __init__(self, group: Group, num_bytes: int) -> None:
        """num_bytes: of one rank's part, the same on every rank; BadInput names two ranks that differ."""
        self.num_bytes = num_bytes
        offers = group.all_gather((host_identity(), num_bytes, f"tracekern-heap-{secrets.token_hex(8)}"))
        _check_offers(offers)
        own = SHM_DIR / offers[group.rank][2]
        problem = _reserve(str(own), num_bytes)
        problems = group.all_gather(problem)
        try:
            for rank, text in enumerate(problems):
                if text:
                    raise BadInput(f"symmetric heap of rank {rank}: {text}")
            self._maps = [_map(str(SHM_DIR / name), num_bytes) for _, _, name in offers]
            group.barrier()
        finally:
            own.unlink(missing_ok=True)
        self.addresses = [int(part.ctypes.data) for part in self._maps]


def _check_offers(offers: list[tuple[str, int, str]]) -> None:
    for rank, (node, num_bytes, _) in enumerate(offers):
        if num_bytes != offers[0][1]:
            raise BadInput(
                f"symmetric heap: rank 0 asks for {offers[0][1]} bytes, rank {rank} for {num_bytes}; "
                "every rank must use the same shape"
            )
        if node != offers[0][0]:
            raise BadInput(
                f"symmetric heap: rank 0 is on {offers[0][0]}, rank {rank} on {node}; "
                "these kernels reach the ranks of one node only"
            )


def _reserve(path: str, num_bytes: int) -> str:
    """Makes the file; a full /dev/shm shows here and not as SIGBUS in a kernel. Returns what went wrong."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        return f"{num_bytes} bytes of shared memory: {error.strerror}; make {SHM_DIR} larger or the shape smaller"
    finally:
        os.close(descriptor)
    return ""


def _map(path: str, num_bytes: int) -> np.ndarray:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
    finally:
        os.close(descriptor)
