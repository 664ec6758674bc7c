"""What benchmarks/analysis.py and benchmarks/merge.py tell of memory is that of what they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from toolchains import ROOT

from tests.captures import CaptureSpec, write_capture

FAT_BYTES = 256 << 20


def child(*arguments: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_what_was_held_before_the_questions_is_not_what_they_leave_behind():
    found = child("benchmarks/analysis.py", "--child=400000", "--rounds=1")
    held = {
        name: question["process_peak_bytes"][0] - question["peak_bytes"][0]
        for name, question in found["questions"].items()
    }
    assert abs(found["timeline_bytes"] - held["waits"]) < 1 << 20
    assert found["timeline_bytes"] < held["all of a report"]


def test_the_peak_of_a_merge_is_not_that_of_who_started_it(tmp_path):
    """On Linux a process starts with the peak of the one it came from, by getrusage()."""
    capture = write_capture(tmp_path / "capture", CaptureSpec(num_ranks=2))
    fat = b"x" * FAT_BYTES
    found = child("benchmarks/merge.py", "--merge", str(capture), str(tmp_path / "trace.pftrace.gz"))
    assert 0 < found["peak_bytes"] < len(fat)
