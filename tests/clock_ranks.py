"""One rank of test_clock_samples.py: python clock_ranks.py DIRECTORY SEEDS T0_NS HEAP_RANKS DIES_AFTER_ROUND.

SEEDS: of each rank's clock, joined by commas; ranks of seed 0 read the host's clock.

Leaves rank_<r>.npz in the directory: its clock samples, and ticks that it read in between.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from tracekern import _core
from tracekern.comm.devices.cpu import SimulatedClock
from tracekern.comm.ranks.group import Group
from tracekern.errors import PeerLost
from tracekern.record.clock_samples import ClockSampler

PART_BYTES = 1 << 16
NUM_ROUNDS = 3


def open_clock(heap, seed, t0_ns, num_heap_ranks):
    """The simulated clock of this rank; its end of the heap is in the mapped file."""
    heaps = [heap.ctypes.data + PART_BYTES * index for index in range(dist.get_world_size())]
    native = _core.CpuCommunicator(dist.get_rank(), heaps, 5_000_000_000, seed, t0_ns)
    return SimulatedClock(native, range(num_heap_ranks), seed)


def main():
    directory = sys.argv[1]
    t0_ns, num_heap_ranks, dies_after_round = map(int, sys.argv[3:])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed = int(sys.argv[2].split(",")[rank])
    heap = np.memmap(Path(directory) / "heap", np.uint8, "r+", shape=(dist.get_world_size(), PART_BYTES))
    clock = open_clock(heap, seed, t0_ns, num_heap_ranks)
    dist.barrier()
    rows, ticks, failure = [], [], ""
    group = Group.discover()
    sampler = ClockSampler(clock, rows.append, group, clock, timeout_s=20)
    try:
        for round_idx in range(NUM_ROUNDS):
            sampler.sample()
            if round_idx == dies_after_round and rank == dist.get_world_size() - 1:
                break
            for _ in range(20):
                ticks.append(clock.read_ticks())
                time.sleep(0.01)
    except PeerLost as error:
        failure = str(error)
    left = {"rows": np.concatenate(rows), "ticks": ticks, "failure": failure, "clock_id": clock.id}
    np.savez(Path(directory) / f"rank_{rank}.npz", **left)
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
