"""What rows of 14 KB reach over NVLink where nothing else is done: the ceiling for kernels that store into their peers.

    python benchmarks/links.py [--launches 20] [--rows 12288]

All GPUs of the host send to all others at once, then one alone; by stores of all lanes and by bulk copies through
shared memory, with a flag behind each row and without. A rate is that of the GPU that took longest, from right before
its launch to its kernel's end; nothing of the launch is taken off. Needs two GPUs and nvcc. Exits with 1 when a row did
not arrive.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, build, require_gpus, write_results

from tracekern.moe.calls.wire import WIRE_BYTES_PER_NS


def print_tables(rows: list[dict[str, Any]]) -> None:
    for senders in dict.fromkeys(row["senders"] for row in rows):
        title = "one GPU sends to all others" if senders == 1 else f"{senders} GPUs send to all others at once"
        columns = ["", "grid", "GB/s", "p10", "p90", f"of {WIRE_BYTES_PER_NS:.0f}"]
        table = Table(f"{title}, GB/s of the slowest", columns)
        for row in rows:
            if row["senders"] == senders:
                rates = [row["gb_per_s"], row["p10"], row["p90"]]
                share = f"{row['gb_per_s'] / WIRE_BYTES_PER_NS:.0%}"
                table.add(row["kind"], f"{row['blocks']}x{row['warps']}", *(f"{rate:.0f}" for rate in rates), share)
        table.print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--rows", type=int, default=12288, help="of each GPU")
    options = parser.parse_args()
    if options.launches < 1 or options.rows < 8:
        parser.error("wanted --launches of 1 or more and --rows of 8 or more")
    require_gpus(2)
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), "links")
        command = [str(program), str(options.launches), str(options.rows)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if rows:
        print_tables(rows)
        num_gpus = rows[0]["senders"]
        about = {"row_bytes": 14336, "limit_gb_per_s": WIRE_BYTES_PER_NS, "rows": rows}
        write_results(f"links_{num_gpus}", about, num_gpus)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
