"""What benchmarks share: a table on the terminal, and a JSON file that says where, when and how it was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


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


def cpu_model() -> str:
    """The processor's name, as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def write_results(name: str, results: dict[str, Any], device: str = "", driver: str = "") -> Path:
    """benchmarks/results/<name>.json: device, driver, date and command beside the results. Returns the path."""
    about = {
        "benchmark": name,
        "device": device or f"{cpu_model()}, {os.cpu_count()} cores",
        "driver": driver or f"Linux {platform.release()}, Python {platform.python_version()}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps({**about, **results}, indent=1) + "\n")
    partial.replace(path)
    print(f"-> {os.path.relpath(path)}")
    return path
