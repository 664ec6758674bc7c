"""Sends tokens around a ring of ranks, and leaves the capture in ring-capture/.

    torchrun --nproc-per-node 2 examples/ring/run_it.py [--slow RANK] [--delays] [--backend cpu|cuda]
    tracekern report ring-capture

--slow: this rank takes 1 ms longer for a token than the others; the report says whose ring is full.
Exits with 0 where every rank received what was sent.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pybind11
import torch
import torch.distributed as dist

import tracekern

HERE = Path(__file__).resolve().parent
NUM_CALLS, NUM_CHANNELS, NUM_TOKENS = 4, 2, 50
SLOW_NS = 1_000_000
COMPILERS = {
    "cpu": ["g++", "-fPIC", "-pthread"],
    "cuda": ["nvcc", "-x", "cu", "-arch=native", "-Xcompiler", "-fPIC"],
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sends tokens around a ring of ranks.")
    parser.add_argument("--slow", type=int, default=-1, metavar="RANK", help="this rank is a slow receiver")
    parser.add_argument("--delays", action="store_true", help="random delays at every signal and wait")
    parser.add_argument("--backend", choices=tuple(COMPILERS), default="cpu", help="default: cpu")
    parser.add_argument("-o", "--output", type=Path, default=Path("ring-capture"), help="default: ring-capture")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start the ranks with torchrun --nproc-per-node 2 examples/ring/run_it.py")
    return options


def build(options: argparse.Namespace) -> Path:
    """Compiles the extension; returns its folder, one for each way to build it."""
    directory = options.output.resolve() / f"built_{options.backend}{'_delays' * options.delays}"
    target, source = directory / f"ring{sysconfig.get_config_var('EXT_SUFFIX')}", HERE / "ring.cpp"
    newest = max(path.stat().st_mtime for path in (source, HERE / "ring.h"))
    is_built = target.exists() and target.stat().st_mtime > newest
    if int(os.environ["LOCAL_RANK"]) == 0 and not is_built:
        print("building ring.cpp, some seconds")
        directory.mkdir(parents=True, exist_ok=True)
        includes = [tracekern.include_path(), pybind11.get_include(), sysconfig.get_path("include")]
        flags = ["-std=c++20", "-O2", "-shared", *(f"-I{path}" for path in includes)]
        flags += ["-DTK_RANDOM_DELAYS"] * options.delays
        subprocess.run([*COMPILERS[options.backend], *flags, source, "-o", target], check=True)
    dist.barrier()
    return directory


def tokens_of(rank: int, call: int, shape: tuple[int, ...]) -> torch.Tensor:
    first = (call * dist.get_world_size() + rank) << 20
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


def send_around(ring: Any, options: argparse.Namespace) -> bool:
    """Whether this rank received what the one before it sent, in every call."""
    comm = tracekern.Communicator(tracekern.Group.discover(), 1 << 16, timeout_s=20.0, backend=options.backend)
    comm.add_kernels(["ring"], channels=["tail", "credit", "arrival"])
    rank, previous = comm.group.rank, (comm.group.rank - 1) % comm.group.num_ranks
    shape = (NUM_CHANNELS, NUM_TOKENS, ring.words_per_token)
    slots = comm.malloc_symmetric((NUM_CHANNELS, ring.slots, ring.words_per_token), torch.int32)
    words = {name: comm.malloc_symmetric((NUM_CHANNELS,), torch.int64) for name in ("tails", "credits", "arrivals")}
    words["credits"].local.fill_(ring.slots)
    received = torch.zeros(shape, dtype=torch.int32, device=options.backend)
    clock = comm.native.clock if options.backend == "cpu" else b""
    slow_ns = SLOW_NS if rank == options.slow else 0
    is_right = True
    comm.barrier()  # no credit is returned before all begin full
    with tracekern.capture(options.output, device=comm.device) as capture:
        for call in range(1, NUM_CALLS + 1):
            sent = tokens_of(rank, call, shape).to(options.backend)
            memory = {name: tensor.offset for name, tensor in (*words.items(), ("slots", slots))}
            memory |= {"sent": sent.data_ptr(), "received": received.data_ptr()}
            # One epoch: counts run on, so a wait may be for what an earlier call signalled.
            launch = capture.launch(
                "ring", grid=NUM_CHANNELS, warps=ring.warps, events=ring.events(), roles=["send", "receive"], epoch=1
            )
            with comm.guarded():
                arguments = (comm.native.kernel_args, clock, memory, NUM_TOKENS, call, slow_ns)
                ring.run(*arguments, launch.descriptor, launch.grid)
            comm.synchronize()
            is_right &= torch.equal(received.cpu(), tokens_of(previous, call, shape))
    return is_right


def main() -> int:
    options = parse_options()
    dist.init_process_group("gloo")
    if options.backend == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    sys.path.insert(0, str(build(options)))
    import ring  # built by now

    is_right = send_around(ring, options)
    print(f"rank {dist.get_rank()} received {'all' if is_right else 'NOT'} that was sent to it")
    dist.destroy_process_group()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
