"""Barriers of some warps and of the grid: the macros execute them, and their waits are charged to who came last."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from elf import read_sections
from toolchains import GXX, NVCC, ROOT, SAMPLE, compile_cached

import tracekern
from tracekern.analysis.waits.analyze import WaitKind, analyze_waits

pytestmark = pytest.mark.programs("csrc/tracekern.h")

BLOCKS, WARPS, ROUNDS = 2, 4, 3
LATE_OF_PAIR = {0: 1, 1: 2}

KERNEL = """#include <cooperative_groups.h>
#include <tracekern.h>
#define MEET_EVENTS(EVENT) \\
    EVENT(wait_group, wait, completion, "warps group barrier", "barrier:4 warps:6", "") \\
    EVENT(wait_grid, wait, completion, "", "", "")
TK_DEFINE_EVENTS(MeetEvent, MEET_EVENTS)
using namespace tracekern::api;
template <class Trace>
__global__ void meet(float* rows, int id, int warps, Trace trace) {
    TK_RECORDER(trace);
    {
        TK_WAIT(recorder, MeetEvent::wait_group, id, warps);
        TK_END_AFTER_GROUP_BARRIER(id, warps);
    }
    rows[blockIdx.x] += rows[threadIdx.x];
    TK_WAIT(recorder, MeetEvent::wait_grid);
    TK_END_AFTER_GRID_BARRIER(current_warp(), cooperative_groups::this_grid().sync());
    rows[blockIdx.x] += rows[threadIdx.x];
}
__global__ void plain(float* rows, int id, int warps, Recorder<false>::Args) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(warps * 32) : "memory");
    rows[blockIdx.x] += rows[threadIdx.x];
    cooperative_groups::this_grid().sync();
    rows[blockIdx.x] += rows[threadIdx.x];
}
template __global__ void meet(float*, int, int, Recorder<false>::Args);
template __global__ void meet(float*, int, int, Recorder<true>::Args);
"""


def test_who_came_last_is_charged(tmp_path: Path):
    source = ROOT / "tests" / "cpp" / "warp_barriers.cpp"
    library = ctypes.CDLL(str(compile_cached((*GXX, "-O1", "-shared", "-fPIC"), source, ".so")))
    library.run.argtypes, library.describe.restype = [ctypes.c_uint64], ctypes.c_char_p
    assert library.run(0) == 0
    with tracekern.capture(tmp_path / "capture") as capture:
        launch = capture.launch("meet", grid=BLOCKS, warps=WARPS, events=library.describe().decode())
        assert library.run(launch.descriptor) == 0
    timeline = tracekern.load(tmp_path / "capture")
    assert timeline.problems == ()
    waits = analyze_waits(timeline)
    at, last = (
        [(track.block, track.warp) for track in (timeline.tracks[i] for i in timeline.spans.track[row].tolist())]
        for row in (waits.row, waits.last_arrival)
    )
    at_grid = np.isin(waits.row, timeline.rows_of("wait_grid")).tolist()
    assert sorted(zip(at, at_grid, strict=True)) == sorted(
        ((block, warp), is_grid)
        for block in range(BLOCKS)
        for warp in range(WARPS)
        for is_grid in (False, True)
        for _ in range(ROUNDS)
    )
    wanted = [
        (BLOCKS - 1, WARPS - 1) if is_grid else (block, LATE_OF_PAIR[warp // 2])
        for (block, warp), is_grid in zip(at, at_grid, strict=True)
    ]
    assert last == wanted
    assert (waits.kind == WaitKind.BARRIER).all()
    assert ((waits.late_ns > 0) == [here != late for here, late in zip(at, wanted, strict=True)]).all()


@pytest.mark.compilers
def test_untraced_they_are_the_barriers_themselves(tmp_path: Path):
    source = tmp_path / "meet.cu"
    source.write_text(KERNEL)
    command = tuple(word.replace("c++20", "c++17") for word in NVCC if word not in SAMPLE)
    sections = read_sections(compile_cached((*command, "-cubin"), source, ".cubin"))
    plain, *meet = sorted(
        ((name, section.data) for name, section in sections.items() if name.startswith(".text.")),
        key=lambda one: ("plain" not in one[0], len(one[1])),
    )
    assert [one == plain[1] for _, one in meet] == [True, False]
    bodies = re.split(r"\.entry ", compile_cached((*command, "-ptx"), source, ".ptx").read_text())[1:]
    traced = max(bodies, key=len)
    words = re.findall(r"bar(?:rier)?(?:\.sync|\.red)|@!%p bra UNREAD", traced)
    assert words.count("bar.red") + words.count("barrier.red") == 2
    assert words[:2] == ["bar.red", "@!%p bra UNREAD"]
    assert words[-2:] in (["bar.red", "@!%p bra UNREAD"], ["barrier.red", "@!%p bra UNREAD"])
