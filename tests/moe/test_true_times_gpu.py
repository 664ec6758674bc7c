"""A clock read means what it says: spans that end at a barrier or an arrival read the time of the last one to come."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess

import pytest
from devices import require_gpu
from toolchains import NVCC, ROOT, compile_cached

SOURCE = ROOT / "tests" / "cpp" / "true_times.cu"
DELAY_NS = 20_000
TICK_NS = 32
TOLERANCE_NS = 100 + TICK_NS
BARRIER_NS = 5_000
"""More than any of these barriers takes once the last one has come."""
KINDS = ("block", "mbarrier", "bulk_copy", "cluster", "grid")

Spans = list[tuple[int, int, int]]


@functools.cache
def measured() -> dict[tuple[str, str], Spans]:
    """(kind, traced or naive) -> (span, late, witness) in ns of every warp that waited for the late one."""
    program = compile_cached(NVCC, SOURCE, "")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, str], Spans] = {}
    for line in done.stdout.splitlines():
        kind, mode, _, *times = line.split()
        found.setdefault((kind, mode), []).append(tuple(map(int, times)))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["block", "mbarrier"])
def test_a_wait_reads_the_time_of_the_late_arrival(kind):
    require_gpu()
    spans = measured()[kind, "traced"]
    assert len(spans) == 7
    assert [span for span, _, _ in spans if abs(span - DELAY_NS) > TOLERANCE_NS] == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_ends_when_what_it_waited_for_is_there(kind):
    require_gpu()
    spans = [(span, witness) for span, _, witness in measured()[kind, "traced"] if witness >= 0]
    assert len(spans) == 7
    assert [pair for pair in spans if abs(pair[0] - pair[1]) > TOLERANCE_NS] == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "warps"), [("block", 7), ("mbarrier", 7), ("bulk_copy", 7), ("cluster", 15), ("grid", 127)]
)
def test_no_wait_ends_before_the_late_one_comes_nor_long_after(kind, warps):
    require_gpu()
    after = [span - late for span, late, _ in measured()[kind, "traced"]]
    assert len(after) == warps
    assert -TICK_NS <= min(after) <= max(after) < BARRIER_NS


@pytest.mark.gpu
def test_the_naive_read_behind_a_block_barrier_is_wrong():
    require_gpu()
    assert max(span for span, _, _ in measured()["block", "naive"]) < DELAY_NS / 2


@pytest.mark.programs("tests/cpp/true_times.cu", rotates=False)
@pytest.mark.compilers
def test_the_read_behind_a_block_barrier_depends_on_its_result():
    cubin = compile_cached((*NVCC, "-cubin"), SOURCE, ".cubin")
    if shutil.which("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed (CUDA toolkit)")
    text = subprocess.run(["nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\.text\.", text, flags=re.MULTILINE)
    (kernel,) = (part for part in parts if "KindE0ELb0" in part.split(":")[0])
    behind_last_barrier = kernel[kernel.rindex("BAR.RED") :]
    found = re.search(
        r"B2R\.RESULT R\d+(?:(?!GLOBALTIMER).)*@P\d CS2R \S+ SR_GLOBALTIMERLO", behind_last_barrier, re.DOTALL
    )
    assert found, "the first read behind the barrier is not under a predicate"
