"""What benchmarks share: a table, a JSON file that says where, when and how it was measured, a compiler for GPUs."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Table:
    """Rows of text in aligned columns."""

    def __init__(self, title: str, columns: list[str]) -> None:
        self.title = title
        self.rows = [columns]

    def add(self, *cells: str) -> None:
        self.rows.append(list(cells))

    def print(self) -> None:
        widths = [max(len(row[i]) for row in self.rows) for i in range(len(self.rows[0]))]
        print(self.title)
        for row in self.rows:
            print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


Verdict = dict[str, Any]


def judged(rows: list[tuple[str, float, float]]) -> list[Verdict]:
    """rows: what was measured, the number, and what it may be at most."""
    return [{"what": what, "measured": value, "bound": bound, "met": value <= bound} for what, value, bound in rows]


def print_verdicts(verdicts: list[Verdict]) -> None:
    table = Table("bounds", ["what", "measured", "at most", "met"])
    for row in verdicts:
        table.add(row["what"], f"{row['measured']:.2f}", f"{row['bound']:g}", "yes" if row["met"] else "NO")
    table.print()


def measured_in_child(*arguments: str) -> dict[str, Any]:
    """What this program prints as JSON in a process of its own, called with --child and these arguments."""
    command = [sys.executable, sys.argv[0], "--child", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return dict(json.loads(done.stdout))


def about_network(provider: str, status: str = "run") -> dict[str, Any]:
    """What each result of a network says. status: run, rehearsed, or not run."""
    return {"provider": provider, "status": status, "cores": os.cpu_count()}


def cpu_model() -> str:
    """The processor's name, as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def nvidia_smi(field: str) -> str:
    """One property of the first GPU, "" where it cannot be told."""
    command = [shutil.which("nvidia-smi") or "true", "--id=0", f"--query-gpu={field}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def count_gpus() -> int:
    listed = subprocess.run([shutil.which("nvidia-smi") or "true", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def require_gpus(count: int) -> None:
    """Ends the program with one line and 2 where there are fewer."""
    here = count_gpus()
    if here < count:
        program = Path(sys.argv[0]).stem
        wanted = f"{count} GPUs" if count > 1 else "a GPU"
        print(f"{program}: needs {wanted}, nvidia-smi names {here}; run it where they are", file=sys.stderr)
        raise SystemExit(2)


def build(folder: Path, name: str, include: Path | None = None) -> Path:
    """Compiles benchmarks/<name>.cu for this machine's GPU, with FlashInfer's header where `include` has it."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    capability = nvidia_smi("compute_cap").replace(".", "") or "90"
    command = [nvcc, f"-arch=sm_{capability}", "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}"]
    if include is not None:
        command += ["-DTK_FLASHINFER", f"-I{include}"]
    program = folder / name
    subprocess.run([*command, "-o", str(program), str(ROOT / "benchmarks" / f"{name}.cu")], check=True)
    return program


def counted_launches(segment: Any) -> list[Any]:
    """Of what ran inside counting(): regions that it reserved for the launches to come stand in the segment, too."""
    from tracekern.dump.format import ENTRY_COUNTED_ONLY

    return [entry for entry in segment.launches() if entry["flags"] & ENTRY_COUNTED_ONLY]


def bytes_counted(segment: Any) -> int:
    """What the kernels that ran inside counting() store where they are recorded: records, and headers of tracks."""
    from tracekern.dump.format import RECORD_BYTES
    from tracekern.record.sinks import STORES_PER_TRACK

    headers = [segment.track_headers(entry) for entry in counted_launches(segment)]
    stores = sum(int(of_one["attempted"].sum()) + STORES_PER_TRACK * len(of_one) for of_one in headers)
    return stores * RECORD_BYTES


def resident_bytes(name: str) -> int:
    """VmRSS: what this process holds now; VmHWM: the most it ever held. Of this program alone: what getrusage() calls
    the peak of a child counts the memory of the process that started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def read_results(name: str) -> dict[str, Any]:
    """What write_results() left, {} without."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_results(name: str, results: dict[str, Any], num_gpus: int = 0) -> Path:
    """benchmarks/results/<name>.json: device, driver, date and command beside the results. Returns the path.

    num_gpus: that were measured; 0: the processor was.
    """
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    about = {
        "benchmark": name,
        "device": f"{num_gpus}x {nvidia_smi('name')}" if num_gpus else f"{cpu_model()}, {os.cpu_count()} cores",
        "driver": nvidia_smi("driver_version") if num_gpus else system,
        "date": now(),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps({**about, **results}, indent=1) + "\n")
    partial.replace(path)
    print(f"-> {os.path.relpath(path)}")
    return path
