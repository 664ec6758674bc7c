"""Builds signals.cpp, has two ranks tell each other numbers, and leaves the capture in signals-capture/.

python examples/signals/trace_it.py && tracekern report signals-capture

With --hang rank 1 leaves out the last call: rank 0 waits in vain, and this exits with 3.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import torch
import torch.distributed as dist

import tracekern

HERE = Path(__file__).resolve().parent
NUM_RANKS, NUM_CALLS = 2, 3


def build() -> None:
    includes = [tracekern.include_path(), pybind11.get_include(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", *(f"-I{path}" for path in includes)]
    target = HERE / f"signals{sysconfig.get_config_var('EXT_SUFFIX')}"
    print("building signals.cpp, some seconds")
    subprocess.run(["g++", *flags, HERE / "signals.cpp", "-o", target], check=True)


def tell_numbers(num_calls: int) -> None:
    import signals  # built by now

    comm = tracekern.Communicator(tracekern.Group.discover(), num_bytes=1 << 16, timeout_s=2.0)
    comm.add_kernels(["tell"], channels=["number"])
    # Two in turns: a fast rank may be in the next call while a slow one still reads this one's flags, but not in the
    # one after, for which it needs the slow one.
    flags = [comm.malloc_symmetric((comm.group.num_ranks,), torch.int64) for _ in range(2)]
    with tracekern.capture("signals-capture", device=comm.device) as capture:
        for call in range(1, num_calls + 1):
            launch = capture.launch("tell", grid=1, warps=1, events=signals.events())
            with comm.guarded():
                args, number = comm.native.kernel_args, 100 + comm.group.rank
                signals.tell(args, comm.native.clock, flags[call % 2].offset, call, number, launch.descriptor)


def main_of_rank() -> int:
    """One rank; started by main()."""
    dist.init_process_group("gloo")
    leaves_out = int(os.environ["SIGNALS_HANG"]) and dist.get_rank() == 1
    try:
        tell_numbers(NUM_CALLS - 1 if leaves_out else NUM_CALLS)
    except tracekern.CommTimeout as error:
        print(error)
        return error.exit_code
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hang", action="store_true", help="rank 1 leaves out the last call")
    options = parser.parse_args()
    build()
    env = {"SIGNALS_HANG": str(int(options.hang))}
    exits = tracekern.launch_ranks(NUM_RANKS, "trace_it:main_of_rank", env=env)
    print("the calls are in signals-capture/   who waited for whom: tracekern report signals-capture")
    return max(abs(ended.returncode) for ended in exits)


if __name__ == "__main__":
    sys.exit(main())
