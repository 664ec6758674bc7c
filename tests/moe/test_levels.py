"""Levels of detail: which body of a kernel runs, what is compiled into it, and which bodies there are."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from toolchains import CSRC, NVCC, ROOT, SAMPLE, compile_cached, program

import tracekern
from tracekern.errors import BadInput

EVENT = {"class": "work", "ends_at": "issue", "channel": "", "begin_fields": "", "end_fields": ""}
TABLE = {"name": "T", "events": [EVENT | {"name": f"copy_{level}", "level": level} for level in "132"]}

# Untraced, first records, and first records of the coarse events.
KERNEL = """#include "tracekern.h"
#include <vector>
#define MY_EVENTS(EVENT) \\
    EVENT(copy_row, work, issue, "", "row:32", "") \\
    EVENT(wait_row, wait, completion, "", "", "", 2)
TK_DEFINE_EVENTS(MyEvent, MY_EVENTS)
using namespace tracekern::api;
template <class Trace>
__global__ void copy(float* rows, Trace trace) {
    TK_RECORDER(trace);
    {
        TK_RANGE(recorder, MyEvent::copy_row, blockIdx.x);
        rows[threadIdx.x] = 1;
    }
    TK_WAIT_IF(recorder, rows[0] != 0, MyEvent::wait_row);
    TK_END_AFTER_BARRIER(current_warp());
}
// The waits of docs/instrumenting.md.
__device__ uint32_t try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{ .reg .pred %%p; mbarrier.try_wait.parity.shared::cta.b64 %%p, [%1], %2; selp.u32 %0, 1, 0, %%p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
template <class Trace>
__global__ void wait_rows(const uint64_t* flag, uint64_t wanted, uint32_t barrier, Trace trace) {
    TK_RECORDER(trace);
    {
        uint64_t seen;
        TK_WAIT(recorder, MyEvent::wait_row);
        do seen = tracekern::load_acquire_system(flag);
        while (seen < wanted);
        TK_END_AFTER(seen);
    }
    uint32_t done;
    TK_WAIT(recorder, MyEvent::wait_row);
    do done = try_wait(barrier, 0);
    while (!done);
    TK_END_AFTER(done);
}
#define RING_EVENTS(EVENT)                                                                 \\
    EVENT(wait_slot, wait, completion, "slot credit", "peer:10 wanted:13", "seen:32") \\
    EVENT(copy_row, work, issue, "", "row:32", "")
TK_DEFINE_EVENTS(RingEvent, RING_EVENTS)
template <class Trace>
__global__ void ring(const uint32_t* head, uint32_t peer, uint32_t num_rows, Trace trace) {
    TK_RECORDER(trace);
    const auto load_free = [&] { return tracekern::load_relaxed_system(head) + 8; };
    const auto copy_row = [](uint32_t) { __syncwarp(); };
    RING_OF_THE_GUIDE
}
template __global__ void ring(const uint32_t*, uint32_t, uint32_t, Recorder<true>::Args);
template __global__ void wait_rows(const uint64_t*, uint64_t, uint32_t, Recorder<true>::Args);
using Coarse = Recorder<true, RecordFormat::span, 1>;
void launch(uint64_t descriptor, float* rows) {
    with_recorder<Recorder<true>, Coarse>(descriptor, [&](auto trace) { copy<<<1, 32>>>(rows, trace); });
}
int loaded() {
    int count = 0;
    for_each_recorder<Recorder<true>, Coarse>([&](auto) { ++count; });
    return count;
}
std::string events() { return describe_events<MyEvent>(); }
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("levels", "-O1"), *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize(("asked", "body"), [(1, 1), (2, 3), (3, 3), (0, 3)])
def test_a_launch_runs_the_smallest_body_that_has_what_it_asks_for(asked: int, body: int):
    coarse = "1 3 copy_row:4 copy_row:7 wait_row:8\n"
    detailed = "3 8 add_word:1 load_word:3 copy_row:4 add_word:5 copy_row:7 wait_row:8\n"
    assert run(0, asked).stdout == {1: coarse, 3: detailed}[body]


def test_what_no_body_has_is_left_out():
    assert run(1, 3).stdout.startswith("2 ")


def test_a_format_that_no_body_has_is_named():
    done = run(2, 0)
    assert done.returncode == 2
    assert "no body for records of format cycles; add Recorder<true, tracekern::RecordFormat::cycles>" in done.stdout


@pytest.mark.parametrize(
    ("record_format", "body", "told"), [(2, 0, " told 80000200"), (1, 2, " told 80000102"), (0, 3, "")]
)
def test_a_capture_that_warns_is_told_what_its_body_lacks(record_format: int, body: int, told: str):
    done = run(record_format, 0, "warn")
    assert done.stdout.startswith(f"{body} ")
    assert done.stdout.rstrip("\n").endswith(told)
    assert ("told" in done.stdout, done.returncode) == (told != "", 0)


@pytest.mark.parametrize(
    ("selected", "level"), [(None, 0), (["copy_3"], 0), (["copy_2", "copy_1"], 2), (["copy_1"], 1), ([], 1)]
)
def test_selecting_events_asks_for_their_level(tmp_path: Path, selected: list[str] | None, level: int):
    with tracekern.capture(tmp_path, events=selected) as capture:
        launch = capture.launch("copy", grid=1, warps=1, events=TABLE)
        assert launch.descriptor >> 2 & 3 == level


@pytest.mark.parametrize(("detail", "wanted"), [("work", 0), ("peers", 1 << 61 | 1 << 2)])
def test_detail_peers_asks_for_all_events_of_level_1(tmp_path: Path, detail, wanted: int):
    with tracekern.capture(tmp_path, detail=detail) as capture:
        launch = capture.launch("copy", grid=1, warps=1, events=TABLE)
        assert launch.descriptor & (1 << 61 | 3 << 2) == wanted


def test_detail_peers_and_names_of_events_are_not_both_taken(tmp_path: Path):
    with pytest.raises(BadInput, match="one of them says what is recorded"):
        tracekern.capture(tmp_path, detail="peers", events=["copy_1"])


def test_a_level_that_there_is_not_is_refused(tmp_path: Path):
    table = json.dumps(TABLE).replace('"level": "2"', '"level": "4"')
    with tracekern.capture(tmp_path) as capture, pytest.raises(BadInput, match="level '4', wanted one of 1, 2, 3"):
        capture.launch("copy", grid=1, warps=1, events=table)


@pytest.fixture(scope="module")
def ptx_kernels(tmp_path_factory) -> dict[str, list[str]]:
    """The PTX of KERNEL's bodies, by kernel. What CUDA needs is no more than C++17."""
    source = tmp_path_factory.mktemp("levels") / "kernel.cu"
    guide = (ROOT / "docs" / "instrumenting.md").read_text()
    ring = next(block.split("```")[0] for block in guide.split("```cuda")[1:] if "TK_SEQUENCE" in block)
    source.write_text(KERNEL.replace("RING_OF_THE_GUIDE", ring))
    command = tuple(word.replace("c++20", "c++17") for word in NVCC if word not in SAMPLE)
    bodies = re.split(r"\.entry ", compile_cached((*command, "-ptx"), source, ".ptx", CSRC).read_text())[1:]
    return {name: [body for body in bodies if name in body.partition("(")[0]] for name in ("copy", "wait_rows", "ring")}


@pytest.mark.compilers
def test_only_the_bodies_of_the_list_are_compiled(ptx_kernels):
    reads = sorted(len(re.findall("%globaltimer", body)) for body in ptx_kernels["copy"])
    assert len(reads) == 3
    assert 0 == reads[0] < reads[1] < reads[2]


@pytest.mark.compilers
def test_waits_of_ones_own_end_when_their_value_is_there(ptx_kernels):
    (body,) = ptx_kernels["wait_rows"]
    words = re.findall(r"ld\.acquire|mbarrier\.try_wait|@!%p bra UNREAD", body)
    assert words == ["ld.acquire", "@!%p bra UNREAD", "mbarrier.try_wait", "@!%p bra UNREAD"]


@pytest.mark.compilers
def test_the_ring_of_the_guide_compiles_and_its_wait_ends_with_its_value(ptx_kernels):
    (body,) = ptx_kernels["ring"]
    assert body.count("@!%p bra UNREAD") == 1
