"""Two handles on one buffer, and why they hang: builds exchange.cpp, runs two ranks, and reads the trace they leave.

    python examples/two_handles/run_it.py [--tagged] [--backend cpu|cuda] [-o two-handles-capture]

Two ranks make three calls, with handle 0, 1, 0; rank 1 is held up between the first and the second. Without --tagged a
kernel of rank 1 waits in vain, and what is printed says for what and why. Exits with 0 where the outcome is the one
that the protocol promises, with 1 where it is another, and with 2 where the two ranks could not run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NUM_CALLS = 3
COMPILERS = {
    "cpu": ["g++", "-fPIC", "-pthread"],
    "cuda": ["nvcc", "-x", "cu", "-arch=native", "-Xcompiler", "-fPIC"],
}


class Handle:
    """One user of the buffer. In the naive protocol it alone decides which slot its next call takes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_calls = 0

    def take_slot(self) -> int:
        self.num_calls += 1
        return (self.num_calls - 1) % 2


def missing(backend: str) -> str:
    """What this machine lacks for the backend, "" for nothing."""
    compiler = COMPILERS[backend][0]
    if shutil.which(compiler) is None:
        return f"needs {compiler}, which is not in PATH"
    if backend == "cuda":
        import torch

        if torch.cuda.device_count() < 2:
            return f"needs 2 GPUs, {torch.cuda.device_count()} are here; --backend cpu needs none"
    return ""


def build(backend: str, output: Path) -> Path:
    """Compiles the extension, unless it is there and newer than its source; returns its folder, one a backend."""
    import pybind11

    import tracekern

    directory = output / f"built_{backend}"
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"exchange{sysconfig.get_config_var('EXT_SUFFIX')}"
    if target.exists() and target.stat().st_mtime > (HERE / "exchange.cpp").stat().st_mtime:
        return directory
    sys.stderr.write("building exchange.cpp, some seconds\n")
    includes = [tracekern.include_path(), pybind11.get_include(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-O2", "-shared", *(f"-I{path}" for path in includes)]
    subprocess.run([*COMPILERS[backend], *flags, HERE / "exchange.cpp", "-o", target], check=True)
    return directory


def main_of_rank() -> int:
    """One rank; started by main()."""
    import torch.distributed as dist

    import tracekern

    exchange: Any = importlib.import_module("exchange")
    dist.init_process_group("gloo")
    backend, tagged = os.environ["TWO_HANDLES_BACKEND"], os.environ["TWO_HANDLES_TAGGED"] == "1"
    if backend == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    comm = tracekern.Communicator(tracekern.Group.discover(), exchange.heap_bytes, timeout_s=1.0, backend=backend)
    comm.add_kernels(["exchange"], channels=["message"])
    clock = comm.native.clock if backend == "cpu" else b""
    handles = [Handle(0), Handle(1)]
    try:
        with tracekern.capture(os.environ["TWO_HANDLES_CAPTURE"], device=comm.device) as capture:
            for call in range(1, NUM_CALLS + 1):
                if call == 2 and comm.group.rank == 1:
                    with capture.range("held up"):
                        # With tags no rank gets ahead, and the limit ends it.
                        limit_ns = int(0.05e9 if tagged else 5e9)
                        exchange.come_late(comm.native.kernel_args, clock, 1, limit_ns)
                        comm.synchronize()
                handle = handles[(call - 1) % 2]
                slot = (call - 1) % 2 if tagged else handle.take_slot()
                launch = capture.launch("exchange", grid=1, warps=1, events=exchange.events(), epoch=call)
                with comm.guarded():
                    exchange.run(
                        comm.native.kernel_args, clock, tagged, slot, handle.number, call, 7, launch.descriptor
                    )
                comm.synchronize()
    except tracekern.CommTimeout as error:
        sys.stdout.write(f"{error}\n")
        return tracekern.CommTimeout.exit_code
    return 0


def explain(directory: Path) -> list[str]:
    """Who waits for which flag, who raised it, and who wiped it: read from the trace alone."""
    import numpy as np

    import tracekern

    timeline = tracekern.load(directory)
    spans, ranks = timeline.spans, timeline.track_ranks()

    def find(event: str, rank: int, **fields: int) -> np.ndarray:
        """Rows of a rank's spans of that event with these field values."""
        rows = timeline.rows_of(event, rank)
        for name, value in fields.items():
            rows = rows[timeline.field(rows, name) == value]
        return rows

    def field(row: int, name: str) -> int:
        return int(timeline.field(row, name)[0])

    def at(time_ns: int) -> str:
        return f"{time_ns / 1e3:,.1f} us"

    lines = []
    waits = timeline.rows_of("wait_count")
    for row in waits[spans.is_open[waits]]:
        rank, peer, slot, call = int(ranks[spans.track[row]]), *(field(row, name) for name in ("peer", "slot", "call"))
        handle = field(row, "handle")
        lines.append(f"rank {rank} waits in call {call} (handle {handle}) for rank {peer}'s flag in slot {slot}")
        (raised,) = find("signal_count", peer, peer=rank, slot=slot, call=call)
        lines.append(f"  rank {peer} raised it at {at(int(spans.end[raised]))}")
        wiped = find("clear_slot", rank, slot=slot)
        last = int(wiped[spans.start[wiped] < spans.start[row]][-1])
        when = f"{at(int(spans.start[last]))}, in call {timeline.launches[spans.launch[last]].epoch}"
        lines.append(
            f"  rank {rank} wiped slot {slot} at {when}: handle {field(last, 'handle')} took it for its own next slot"
        )
    for signal, wait in zip(timeline.flows.signal, timeline.flows.wait, strict=True):
        if spans.end[wait] < spans.start[signal] and wait in waits:
            rank, call = int(ranks[spans.track[wait]]), field(int(wait), "call")
            early = (spans.start[signal] - spans.end[wait]) / 1e3
            lines.append(
                f"rank {rank} went on in call {call} {early:,.1f} us before the flag of call {call} was raised: "
                "it took one that another call had left"
            )
    return lines or ["every wait met its own signal"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Two handles on one buffer, and why they hang.")
    parser.add_argument("--tagged", action="store_true", help="with flags that name the call, which does not hang")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    output = Path("two-handles-capture")
    parser.add_argument(
        "-o", "--output", type=Path, default=output, help=f"directory of the capture, default: {output}"
    )
    options = parser.parse_args()
    import tracekern

    if lack := missing(options.backend):
        sys.stderr.write(f"run_it: --backend {options.backend} {lack}\n")
        return 2
    try:
        module_dir = build(options.backend, options.output)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"run_it: {error.cmd[0]} ended with {error.returncode}; its output is above\n")
        return 2
    exits = tracekern.launch_ranks(
        2,
        "run_it:main_of_rank",
        env={
            "PYTHONPATH": str(module_dir.resolve()),
            "TWO_HANDLES_BACKEND": options.backend,
            "TWO_HANDLES_TAGGED": str(int(options.tagged)),
            "TWO_HANDLES_CAPTURE": str(options.output.resolve()),
        },
        timeout_s=60,
    )
    for ended in exits:
        if ended.returncode not in (
            0,
            tracekern.CommTimeout.exit_code,
        ):  # then a capture that is there may be of another run
            sys.stderr.write(f"run_it: rank {ended.rank} ended with {ended.returncode}; there is nothing to explain\n")
            return 2
    for line in explain(options.output):
        print(line)
    hung = any(ended.returncode for ended in exits)
    return 0 if hung != options.tagged else 1


if __name__ == "__main__":
    sys.exit(main())
