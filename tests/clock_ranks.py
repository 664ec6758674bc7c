"""One rank of tests/test_clock_samples.py: python clock_ranks.py DIRECTORY SEED T0_NS HEAP_RANKS DIES_AFTER_ROUND.

Leaves rank_<r>.npz in the directory: its clock samples, and ticks that it read in between.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from tracekern import _C
from tracekern.comm.device import HostDevice
from tracekern.errors import CommTimeout
from tracekern.record.clock_samples import ClockSampler

PART_BYTES = 1 << 16
NUM_ROUNDS = 3


class HeapDevice(HostDevice):
    """The simulated clock of a rank, and its end of a heap that is a mapped file."""

    def __init__(self, directory, seed, t0_ns, num_heap_ranks):
        rank = dist.get_rank()
        self._map = np.memmap(Path(directory) / "heap", np.uint8, "r+", shape=(dist.get_world_size(), PART_BYTES))
        base = self._map.ctypes.data
        heaps = [base + PART_BYTES * index for index in range(dist.get_world_size())]
        self._comm = _C.CpuCommunicator(rank, heaps, 5_000_000_000, seed, t0_ns)
        self.heap_ranks = range(num_heap_ranks)

    def read_ticks(self):
        return _C.read_clock(self._comm)

    def read_brackets(self, count):
        return _C.read_brackets(self._comm, count)

    def ping_pong(self, *how):
        return _C.clock_ping_pong(self._comm, *how)


def main():
    directory = sys.argv[1]
    seed, t0_ns, num_heap_ranks, dies_after_round = map(int, sys.argv[2:])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = HeapDevice(directory, seed, t0_ns, num_heap_ranks)
    dist.barrier()
    rows, ticks, failure = [], [], ""
    sampler = ClockSampler(device, rows.append, device.heap_ranks, timeout_s=20)
    try:
        for round_idx in range(NUM_ROUNDS):
            sampler.sample()
            if round_idx == dies_after_round and rank == dist.get_world_size() - 1:
                break
            for _ in range(20):
                ticks.append(device.read_ticks())
                time.sleep(0.01)
    except CommTimeout as error:
        failure = str(error)
    np.savez(Path(directory) / f"rank_{rank}.npz", rows=np.concatenate(rows), ticks=ticks, failure=failure)


if __name__ == "__main__":
    main()
