"""Everything that only a GPU machine can show, in one go: build, tests, benchmarks. What `make gpu-check` runs.

    python benchmarks/gpu_all.py [--only NAME ...] [--skip NAME ...]

Each step runs under a time limit of its own and the next goes on whatever came of it. Prints how each ended; exits with
1 when one failed. The benchmarks leave their JSON in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, write_results
from recorder import nvidia_smi

ROOT = Path(__file__).resolve().parents[1]
PYTEST = "-m pytest -q -m 'gpu or multigpu' -p no:cacheprovider"
SLOW = ("test_mutants_gpu.py", "test_sanitizer_gpu.py")  # steps of their own
# Files by name: others need packages that a GPU machine has no use for.
TESTS = " ".join(
    ["tests/test_cycle_clock.py"]
    + [f"tests/{path.name}" for path in sorted(ROOT.glob("tests/test_*gpu*.py")) if path.name not in SLOW]
)


@dataclass(frozen=True)
class Step:
    name: str
    arguments: str
    """Of python; {gpus} stands for the number of GPUs."""
    limit_s: int
    min_gpus: int = 1


STEPS = (
    Step("build", "setup.py build_ext --inplace", 300),
    Step("tests", f"{PYTEST} {TESTS}", 600),
    Step("mutants", f"{PYTEST} tests/test_mutants_gpu.py", 400, 2),
    Step("sanitizer", f"{PYTEST} tests/test_sanitizer_gpu.py", 400),
    Step("recorder", "benchmarks/recorder.py", 300),
    Step("overhead", "benchmarks/overhead_pipeline.py --ranks {gpus}", 400),
    Step("graphs", "benchmarks/graphs.py", 200),
    Step("clocks", "benchmarks/clocks_gpu.py --ranks {gpus}", 200, 2),
    Step("moe", "benchmarks/moe.py --ranks {gpus}", 300),
)


def run_step(step: Step, num_gpus: int) -> tuple[str, float]:
    """("ok" | how it failed, seconds). Its output goes to ours."""
    command = [sys.executable, *shlex.split(step.arguments.format(gpus=num_gpus))]
    print(f"\n== {step.name}: {shlex.join(command[1:])}", flush=True)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started = time.monotonic()
    try:
        code = subprocess.run(
            command, cwd=ROOT, timeout=step.limit_s, env={**os.environ, "PYTHONPATH": path}
        ).returncode
    except subprocess.TimeoutExpired:
        return f"stopped after {step.limit_s} s", time.monotonic() - started
    return "ok" if code == 0 else f"exit {code}", time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--skip", nargs="+", choices=names, default=[])
    options = parser.parse_args()
    num_gpus = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    rows = []
    for step in STEPS:
        if step.name not in options.only or step.name in options.skip:
            continue
        if num_gpus < step.min_gpus:
            rows.append((step.name, f"skipped: needs {step.min_gpus} GPUs, {num_gpus} are here", 0.0))
            continue
        rows.append((step.name, *run_step(step, num_gpus)))
    table = Table(f"\n{num_gpus}x {nvidia_smi('name')}", ["step", "ended", "s"])
    for name, ended, seconds in rows:
        table.add(name, ended, f"{seconds:.0f}")
    table.print()
    steps = [{"step": name, "ended": ended, "seconds": round(seconds, 1)} for name, ended, seconds in rows]
    write_results(
        "gpu_all", {"steps": steps}, device=f"{num_gpus}x {nvidia_smi('name')}", driver=nvidia_smi("driver_version")
    )
    return 0 if all(ended == "ok" or ended.startswith("skipped") for _, ended, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
