"""Everything that only a GPU machine can show, in one go: build, tests, benchmarks. What `make gpu-check` runs.

    python benchmarks/gpu_all.py [--limit-s 1200] [--only NAME ...] [--skip NAME ...]

Needs nothing from a network: python's torch, numpy, pybind11, setuptools, pytest, hypothesis, and nvcc. Each step runs
under a time limit of its own and the next goes on whatever came of it; what the whole has no time left for is not run
and said so. Ends with a table of all steps, and with 1 unless every one that this machine has the GPUs for went well.
Of steps left out the table repeats how an earlier run on as many GPUs ended: there may not be time for all at once.
The benchmarks leave their JSON in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import ROOT, Table, count_gpus, now, nvidia_smi, read_results, write_results

PLANTED = "build/planted"
PYTEST = "-m pytest -q -rs -p no:cacheprovider -m 'gpu or multigpu'"
OVERHEAD = "benchmarks/overhead.py"
BESIDE = "bits or extension"
"""Tests that no neighbour on the GPU disturbs, by name; they take long one after the other."""
OF_THEIR_OWN = ("test_mutants_gpu.py", "test_sanitizer_gpu.py")
# Files by their marks: others need packages that a GPU machine has no use for.
TESTS = " ".join(
    str(path.relative_to(ROOT))
    for path in sorted(ROOT.glob("tests/*/test_*.py"))
    if path.name not in OF_THEIR_OWN and re.search(r"mark\.(multi)?gpu\b", path.read_text())
)
COUNTED = re.compile(r"\d+ (passed|failed|skipped|error)|\d+ of \d+ missed")
"""In what a step prints: the line that the table of all steps repeats."""
GRACE_S = 5.0
RESIDENTS = 8
"""Ranks that are resident on a single GPU."""


@dataclass(frozen=True)
class Step:
    name: str
    arguments: str
    """Arguments for python. {gpus} is the number of GPUs; {ranks} is the same, but 8 on a single GPU, where they are
    resident; {workers} are pytest's options to run tests side by side."""
    limit_s: int
    min_gpus: int = 1
    beside: bool = False
    """Runs beside the steps behind it."""
    needs: str = ""
    """A step that ran beside others and has to be through."""


STEPS = (
    Step("planted", f"tests/planted_tree.py {PLANTED}", 200, 2, beside=True),
    Step("build", "setup.py build_ext --inplace", 200),
    Step("sanitizer", f"{PYTEST} {{workers}} tests/moe/test_sanitizer_gpu.py", 200, beside=True),
    Step("results", f"{PYTEST} {{workers}} -k '{BESIDE}' {TESTS}", 300),
    Step("tests", f"{PYTEST} -k 'not ({BESIDE})' {TESTS}", 600, needs="sanitizer"),
    Step("flows", "benchmarks/flows.py --backend cuda --ranks {ranks}", 90),
    Step("clocks", "benchmarks/clocks_gpu.py --ranks {gpus} --seconds 60", 150, 2),
    Step("mutants", f"{PYTEST} tests/moe/test_mutants_gpu.py", 200, 2, needs="planted"),
    Step("links", "benchmarks/links.py", 60, 2),
    Step("moe", "benchmarks/moe.py --ranks {gpus} --name moe_{gpus}", 180),
    Step("launch", "benchmarks/launch.py", 90),
    Step("graphs", "benchmarks/graphs.py", 90),
    Step("recorder", "benchmarks/recorder.py", 240),
    Step("resident", "benchmarks/resident.py", 120),
    Step("overhead", f"{OVERHEAD} low_latency balanced pipelined --ranks {{gpus}} --name overhead_{{gpus}}", 240),
    Step("overhead of int4", f"{OVERHEAD} int4 --name overhead_int4", 120),
    Step(
        "overhead of ways",
        f"{OVERHEAD} balanced --how last host nothing --calls 100 --name overhead_ways_{{gpus}}",
        150,
    ),
    Step(
        "overhead of residents",
        f"{OVERHEAD} low_latency two_hop --ranks 8 --nodes 2 --resident --calls 100 --name overhead_8_resident",
        240,
    ),
    Step(
        "overhead of two hops",
        f"{OVERHEAD} two_hop --ranks {{gpus}} --sms 20 96 128 --calls 100 --name overhead_two_hop_{{gpus}}",
        120,
        2,
    ),
    Step("int4 sparse", "benchmarks/int4_sparse.py", 200),
    Step("experts", "benchmarks/moe_experts.py --ranks {ranks}", 120),
    Step("overlap", "benchmarks/overlap.py --ranks {gpus} --calls 10", 120, 2),
)


class Running:
    """A step that was started. What it prints is printed, each line behind the step's name."""

    def __init__(self, step: Step, num_gpus: int, limit_s: float) -> None:
        self.step, self.limit_s, self.started = step, limit_s, time.monotonic()
        numbers = {"gpus": num_gpus, "ranks": num_gpus if num_gpus > 1 else RESIDENTS}
        command = [sys.executable, *shlex.split(step.arguments.format(**numbers, workers=side_by_side()))]
        print(f"\n== {step.name}: {shlex.join(command[1:])}", flush=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "TRACEKERN_CUDA": "1",  # a build without its GPU half would be no check
        }
        if step.needs == "planted":
            environment["TRACEKERN_PLANTED_TREE"] = str(ROOT / PLANTED)
        # In a process group of its own, so that nothing it started outlives its time.
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.counted = ""
        self.seconds = 0.0
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"[{self.step.name}] {line}", end="", flush=True)
            if COUNTED.search(line):
                self.counted = line.strip(" =\n")
        self.seconds = time.monotonic() - self.started  # here: finish() comes late to what runs beside others

    def finish(self) -> tuple[str, str, float]:
        """(name, how it ended, seconds); how: "ok", with counts of tests or goals, or what went wrong."""
        try:
            code = self.process.wait(max(0.0, self.started + self.limit_s - time.monotonic()))
            self.reader.join(GRACE_S)
            only_skipped = "skipped" in self.counted and "passed" not in self.counted
            ended = f"exit {code}" if code else "nothing ran" if only_skipped else "ok"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {self.limit_s:.0f} s"
        self._end_group()
        self.reader.join(GRACE_S)
        seconds = self.seconds or time.monotonic() - self.started
        return self.step.name, ended + (f": {self.counted}" if self.counted else ""), seconds

    def _end_group(self) -> None:
        """Politely first: who is asked to end removes what it has in /dev/shm."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue
            time.sleep(0.2)


def side_by_side() -> str:
    """Options that run tests in several processes, where pytest can and the processor has the cores."""
    workers = min(8, (os.cpu_count() or 1) // 4)
    return f"-n {workers} --dist worksteal" if workers > 1 and importlib.util.find_spec("xdist") else ""


def run_steps(steps: list[Step], num_gpus: int, limit_s: float) -> list[tuple[str, str, float]]:
    """(name, how it ended, seconds) of each, in their order."""
    deadline = time.monotonic() + limit_s
    rows: dict[str, tuple[str, str, float]] = {}
    beside: dict[str, Running] = {}
    for step in steps:
        if num_gpus < step.min_gpus:
            rows[step.name] = (step.name, f"skipped: needs {step.min_gpus} GPUs, {num_gpus} are here", 0.0)
            continue
        if step.needs in beside:
            rows[step.needs] = beside.pop(step.needs).finish()
        left_s = deadline - time.monotonic() - GRACE_S
        if left_s < GRACE_S:
            rows[step.name] = (step.name, f"not run: nothing left of {limit_s:.0f} s", 0.0)
            continue
        running = Running(step, num_gpus, min(step.limit_s, left_s))
        if step.beside:
            beside[step.name] = running
            continue
        rows[step.name] = running.finish()
    for name, running in beside.items():
        rows[name] = running.finish()
    return [rows[step.name] for step in steps]


def beside_earlier(rows: list[tuple[str, str, float]], earlier: dict[str, Any]) -> list[dict[str, Any]]:
    """All steps, in their order: those of this run, and of the others how the kept results say that they ended."""
    date = now()
    known = {row["step"]: {"date": earlier["date"], **row} for row in earlier.get("steps", ())}
    for name, ended, seconds in rows:
        known[name] = {"step": name, "ended": ended, "seconds": round(seconds, 1), "date": date}
    never = {"ended": "never run", "seconds": 0.0, "date": ""}
    return [known.get(step.name, {"step": step.name, **never}) for step in STEPS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--limit-s", type=float, default=1200, help="for everything")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--skip", nargs="+", choices=names, default=[])
    options = parser.parse_args()
    num_gpus = count_gpus()
    if not num_gpus:
        print("gpu_all: nvidia-smi names no GPU; run `make test` here and this on a machine that has one")
        return 2
    steps = [step for step in STEPS if step.name in options.only and step.name not in options.skip]
    rows = run_steps(steps, num_gpus, options.limit_s)
    name = f"gpu_all_{num_gpus}"
    shown = beside_earlier(rows, read_results(name))
    table = Table(f"\n{num_gpus}x {nvidia_smi('name')}", ["step", "s", "when", "ended"])
    for row in shown:
        table.add(row["step"], f"{row['seconds']:.0f}", row["date"], row["ended"])
    table.print()
    write_results(name, {"steps": shown}, num_gpus)
    return 0 if all(ended.startswith(("ok", "skipped")) for _, ended, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
