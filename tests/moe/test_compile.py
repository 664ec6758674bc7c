"""Every kernel compiles for every device, without stack or spills, and has the instructions that the protocol needs."""

from __future__ import annotations

import functools
import re
import sysconfig
from pathlib import Path

import pybind11
import pytest
from kept_builds import log_of
from kernel_names import readable, untraced
from toolchains import (
    AMD_TARGETS,
    CSRC,
    NVCC,
    ROOT,
    SAMPLE,
    compile_cached,
    compile_sm_90,
    formats,
    hip_command,
    ptxas_flags,
)

SOURCES = sorted(CSRC.rglob("kernels.cu"))
pytestmark = [
    pytest.mark.compilers,
    pytest.mark.programs(*(str(path.relative_to(ROOT)) for path in SOURCES), rotates=False),
]
IDS = [str(path.relative_to(CSRC)) for path in SOURCES]
PROBE = CSRC / "trace" / "kernels.cu"
TRACED = ("span", "ring", "cycles")
# Blocks of 1,024 threads have 64 registers a thread: 4 to 8 numbers of these bodies are in memory. They are there for
# looking at short spans and at what came last, and no call is timed by them.
SPILLING = {f"{family}_combine_{recorder}" for family in ("low_latency", "two_hop") for recorder in ("ring", "cycles")}
# Rings of int4 experts have as many registers as their number of warps leaves, and what a tile has of its own is in
# memory, 8 to 120 bytes: where a tile begins and ends, not in the loops over its stages. Untraced `wide` has none.
SPILLING |= {
    f"gemm_{stage}_{staging}_{recorder}"
    for stage in ("k2", "k4", "k2_many", "k4_many")
    for staging in ("wide", "ring")
    for recorder in ("off", *TRACED, *(f"steps_{recorder}" for recorder in TRACED))
    if (staging, recorder) != ("wide", "off")
}
# A function of its own, which a producer of `wide` calls with 24 registers, once a launch.
SPILLING |= {"_ZN9tracekern6detail10find_trackENS_16LaunchDescriptorEjjjjjb"}

# Kernel without variant, number type and recorder -> does it raise flags that guard a payload? Does it wait for flags?
SIGNALS = {
    "rank_barrier": True,
    "far_rank_barrier": True,
    "initiate_clock_ping_pong": False,  # its words are their own payload
    "answer_clock_ping_pong": False,
    "answer_host_clock": True,
    "delay_stream": False,
    "p2p_dispatch_send": True,
    "p2p_dispatch_recv": False,
    "p2p_scale_experts": False,
    "p2p_combine_send": True,
    "p2p_combine_recv": False,
    "graph_begin_replay": False,
    "graph_prepare_replay": True,  # the slot that the host may fill again
    "probe_spans": False,
    "two_hop_notify_dispatch": True,
    "two_hop_dispatch": True,
    "two_hop_combine": True,
    "two_hop_one_node_dispatch": True,
    "two_hop_one_node_combine": True,
    "p2p_dispatch_combine": True,
    "p2p_dispatch": True,
    "p2p_combine": True,
    "p2p_overlapped_dispatch": True,
    "p2p_overlapped_combine": True,
    "low_latency_dispatch_recv": False,
    "low_latency_dispatch": True,
    "low_latency_scale_experts": False,
    "low_latency_dequantise": False,
    "low_latency_combine_recv": False,
    "low_latency_combine": True,
    "gemm": False,
}
WAITS = {
    "rank_barrier": True,
    "far_rank_barrier": True,
    "initiate_clock_ping_pong": True,
    "answer_clock_ping_pong": True,
    "answer_host_clock": True,
    "delay_stream": False,
    "p2p_dispatch_send": True,
    "p2p_dispatch_recv": True,
    "p2p_scale_experts": False,
    "p2p_combine_send": False,  # the flag variant waits for its own grid
    "p2p_combine_recv": True,
    "graph_begin_replay": True,  # the set that the host laid ready
    "graph_prepare_replay": True,
    "probe_spans": False,
    "two_hop_notify_dispatch": True,
    "two_hop_dispatch": True,
    "two_hop_combine": True,
    "two_hop_one_node_dispatch": True,
    "two_hop_one_node_combine": True,
    "p2p_dispatch_combine": True,
    "p2p_dispatch": True,
    "p2p_combine": True,
    "p2p_overlapped_dispatch": True,
    "p2p_overlapped_combine": True,
    "low_latency_dispatch_recv": True,
    "low_latency_dispatch": True,
    "low_latency_scale_experts": False,
    "low_latency_dequantise": False,
    "low_latency_combine_recv": True,
    "low_latency_combine": True,
    "gemm": False,
}

# What orders memory and reads clocks is in headers that all families share: short sources and one family show it.
SHOWN_ON_AMD = {
    "gfx942": ("comm/kernels.cu", "moe/low_latency/kernels.cu", "trace/kernels.cu"),
    "gfx90a": ("comm/kernels.cu", "trace/kernels.cu"),  # it has as many registers
}
ON_AMD = [
    pytest.param(path, target, id=f"{name}-{target}", marks=[] if name in shown else [pytest.mark.soak])
    for target, shown in SHOWN_ON_AMD.items()
    for path, name in zip(SOURCES, IDS, strict=True)
]


def family(kernel: str) -> str:
    return next(name for name in SIGNALS if kernel.startswith(name))


@functools.cache
def ptx_kernels(source: Path) -> dict[str, str]:
    """Kernel -> its PTX."""
    text = compile_sm_90(source)[0].read_text()
    parts = re.split(r"^\.(?:visible|weak) \.entry (\w+)\(", text, flags=re.MULTILINE)[1:]
    return dict(zip(map(readable, parts[::2]), parts[1::2], strict=True))


@functools.cache
def amd_kernels(source: Path, target: str) -> dict[str, str]:
    """Kernel -> its assembly and descriptor."""
    text = compile_cached((*hip_command(target), "-S"), source, f".{target}.s").read_text()
    bodies = dict(re.findall(r"^(\w+): +; @\1\n(.*?)^\.Lfunc_end\d+:", text, flags=re.MULTILINE | re.DOTALL))
    assert len(bodies) == text.count(".amdhsa_kernel ")
    return {readable(name): body for name, body in bodies.items()}


def by_recorder(kernels: dict[str, str]) -> dict[str, dict[str, str]]:
    """Kernel without its last word -> recorder -> text, for those that come with several."""
    grouped: dict[str, dict[str, str]] = {}
    for name, text in kernels.items():
        stem, recorder = name.rsplit("_", 1)
        if "clock" not in name and not name.startswith(("graph", "delay_stream")):
            grouped.setdefault(stem, {"off": kernels[untraced(name)]})[recorder] = text
    for stem, texts in grouped.items():
        wanted = {"off", "span"}
        is_exchange = stem.startswith(("p2p", "low_latency", "two_hop"))
        if not (SAMPLE and (is_exchange or stem.startswith("gemm"))):
            wanted |= {"ring", "cycles", "whole"} if is_exchange else {"ring", "cycles"}
        assert set(texts) == wanted, stem
    return grouped


def spilling_kernels(cubin: Path) -> set[str]:
    log = log_of(cubin).read_text()
    frames = re.findall(
        r"properties for (\w+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    kernels = re.findall(r"Compiling entry function '(\w+)'", log)
    assert kernels
    assert set(kernels) <= {name for name, *_ in frames}
    return {readable(name) for name, *numbers in frames if numbers != ["0", "0", "0"]}


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_sm_90_has_no_stack_and_no_spills(source):
    assert spilling_kernels(compile_sm_90(source)[1]) <= SPILLING


def test_int4_experts_have_no_spills_where_their_steps_are_recorded():
    # sm_80: the device that their contract was written for. Steps of a sweep are mostly recorded in cycles.
    left = (word for word in NVCC if word not in ("-arch=sm_90", *SAMPLE))
    command = (*left, *formats("cycles"), "-arch=sm_80", "-cubin", *ptxas_flags())
    cubin = compile_cached(command, CSRC / "moe" / "gemm" / "kernels.cu", ".sm_80.cubin")
    assert spilling_kernels(cubin) == set()
    names = map(readable, re.findall(r"Compiling entry function '(\w+)'", log_of(cubin).read_text()))
    assert {"gemm_k2_pinned_steps_cycles", "gemm_k4_direct_steps_cycles", "gemm_k2_reg_cycles"} <= set(names)


def test_int4_experts_multiply_sparse_matrices_with_both_selectors():
    # A step is half 0 and half 1, of gate and up in K2.
    wanted = re.compile(r"mma\.sp::ordered_metadata\S+\s+.*, (\d);")
    texts = ptx_kernels(CSRC / "moe" / "gemm" / "kernels.cu")
    for name, paths in (("gemm_k2_direct_off", 2), ("gemm_k2_pinned_off", 2), ("gemm_k4_pinned_off", 1)):
        selectors = wanted.findall(texts[name])
        steps = 2 * (paths + 1) if "direct" in name else 1  # a whole round of groups, and the last one
        assert sorted(selectors) == ["0"] * (paths * steps) + ["1"] * (paths * steps)
        assert texts[name].count("ldmatrix.sync.aligned.m8n8.x4.trans") == 2 * steps


@pytest.mark.parametrize("staging", ["direct", "pinned"])
@pytest.mark.parametrize(("stage", "paths"), [("k2", 2), ("k4", 1)])
def test_steps_of_int4_experts_stand_between_clock_reads(stage, paths, staging):
    ahead = 2 * (paths + 1) if staging == "direct" else 1
    # The sweep stands in the body twice, with and without its steps.
    words = {"%globaltimer;": "read", "mma.sp": "mma", "ldmatrix": "load_b"}
    text = ptx_kernels(CSRC / "moe" / "gemm" / "kernels.cu")[f"gemm_{stage}_{staging}_steps_span"]
    found = " ".join(words[word] for word in re.findall(r"%globaltimer;|\bmma\.sp|\bldmatrix", text))
    assert len(re.findall(r"read (?=mma read)", found)) == ahead * 2 * paths
    assert len(re.findall(r"read (?=load_b read)", found)) == ahead * 2


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_sm_90_rounds_two_numbers_of_16_bits_at_a_time(source):
    # Alone they go through a slow unit: `pipelined` took 54 us that takes 41 (2 H200, 2026-11-22).
    texts = ptx_kernels(source)
    alone = [name for name, text in texts.items() if re.search(r"\bcvt\.rn\.b?f16\.f32\b", text)]
    assert alone == []
    if source.parent.parent.name == "moe" and source.parent.name != "two_hop":  # which moves rows, and adds up none
        assert any("cvt.rn.bf16x2.f32" in text for text in texts.values())


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_sm_90_reads_the_clock_and_orders_with_the_system(source):
    kernels = ptx_kernels(source)
    assert kernels
    for name, text in kernels.items():
        assert "st.volatile" not in text
        assert "membar" not in text, f"{name}: order is written at the flag"
        if SIGNALS[family(name)]:
            assert "st.release.sys.global.u64" in text, name
        if WAITS[family(name)]:
            assert "ld.acquire.sys.global.u64" in text, name
    for stem, texts in by_recorder(kernels).items():
        reads = {recorder: len(re.findall(r"mov\.u64 \S+, %globaltimer;", text)) for recorder, text in texts.items()}
        assert all(reads[recorder] > reads["off"] for recorder in reads if recorder != "off"), stem
        if not WAITS[family(stem)] and "combine_send_flag" not in stem:
            assert reads["off"] == 0, stem  # only a wait with a time limit reads the clock untraced


MEMORY = re.compile(
    r"%globaltimer;|\bst\.(?:release|relaxed)\.sys|\bld\.(?:acquire|relaxed)\.sys|\bst\.global\.v[24]|\bbar\.(?:sync|red)|\bfence\."
)


@pytest.mark.parametrize("source", ["comm/kernels.cu", "moe/p2p/kernels.cu", "moe/low_latency/kernels.cu"])
def test_sm_90_has_the_fence_of_a_signal_in_its_span(source):
    # The begin is read before the release, whose fence waits for the stores; the end is read right behind it. A ring
    # stores the begin, too, and in a sequence the span before ends with the same read. The fence of a trap, whose code
    # may lie in between, is another.
    span = re.compile(r"read (record ){0,2}(fence\. )*release read record")
    words = {"%globaltimer;": "read", "st.global.v4": "record", "st.global.v2": "record", "st.release.sys": "release"}
    kernels = ptx_kernels(CSRC / source)
    traced = [name for name in kernels if SIGNALS[family(name)] and name.endswith(("_span", "_whole", "_ring"))]
    assert traced
    for name in traced:
        if name.startswith("far_"):  # a command is the other way of the span
            continue
        assert span.search(" ".join(words.get(found, found) for found in MEMORY.findall(kernels[name]))), name


@pytest.mark.parametrize(
    ("source", "kernel"),
    [
        ("moe/p2p/kernels.cu", "p2p_dispatch_recv_token_span"),  # the expert that the flag carried
        ("comm/kernels.cu", "initiate_clock_ping_pong"),  # the reply
        ("comm/kernels.cu", "answer_clock_ping_pong"),  # the request
    ],
)
def test_sm_90_reads_the_clock_after_the_value_it_stamps(source, kernel):
    # The read depends on the value by a branch.
    text = ptx_kernels(CSRC / source)[kernel]
    assert re.search(
        r"mov\.b64 \{%low, %high\}, \S+;\n\s*mov\.u32 %any, %nctaid\.x;\n(\s*or\.b32 %any, %any, %(low|high);\n){2}"
        r"\s*setp\.ne\.u32 %p, %any, 0;\n\s*@!%p bra UNREAD;\n\s*mov\.u64 \S+, %globaltimer;",
        text,
    )


@pytest.mark.parametrize("kernel", ["initiate_clock_ping_pong", "answer_clock_ping_pong", "answer_host_clock"])
def test_sm_90_measures_clocks_with_one_lane(kernel):
    """The others would poll the same word and store stamps of their own."""
    before = ptx_kernels(CSRC / "comm" / "kernels.cu")[kernel].partition("ld.acquire.sys")[0]
    assert re.search(r"%tid\.x;(.|\n)*setp\.ne\.\w+\s+(%p\d+), %r\d+, 0;\n\s*@\2 bra", before)


def test_sm_90_counts_cycles_inside_and_reads_the_clock_at_the_ends():
    texts = by_recorder(ptx_kernels(PROBE))["probe_spans"]
    clocks = {name: re.findall(r"mov\.u64 \S+, %(globaltimer|clock64);", text) for name, text in texts.items()}
    # At each end the realtime clock between two readings of the counter; the start stands there three times: for most
    # launches, for those in a graph, and for what is rare in both.
    anchors = [place for place, clock in enumerate(clocks["cycles"]) if clock == "globaltimer"]
    assert len(anchors) == 4
    assert all(clocks["cycles"][place - 1] == clocks["cycles"][place + 1] == "clock64" for place in anchors)
    assert clocks["cycles"].count("clock64") == 2 * 4 + len(clocks["span"]) - 4
    assert set(clocks["span"]) == {"globaltimer"}


@pytest.mark.parametrize("target", AMD_TARGETS)
def test_amd_counts_cycles_inside_and_reads_the_clock_at_the_ends(target):
    texts = by_recorder(amd_kernels(PROBE, target))["probe_spans"]
    clocks = {name: re.findall(r"\b(s_memrealtime|s_memtime)\b", text) for name, text in texts.items()}
    assert sorted(clocks["cycles"]) == ["s_memrealtime"] * 4 + ["s_memtime"] * (len(clocks["span"]) - 4 + 8)
    assert set(clocks["span"]) == {"s_memrealtime"}


@pytest.mark.parametrize("name", [name for name in IDS if name not in SHOWN_ON_AMD["gfx942"]])
def test_amd_refuses_nothing_in_what_is_not_shown(name):
    compile_cached((*hip_command("gfx942"), "-fsyntax-only"), CSRC / name, ".syntax")


@pytest.mark.parametrize(("source", "target"), ON_AMD)
def test_amd_touches_no_scratch_and_calls_nothing(source, target):
    # By instruction: of scalar registers that went to vector lanes the compiler leaves an empty frame behind.
    text = compile_cached((*hip_command(target), "-S"), source, f".{target}.s").read_text()
    assert re.findall(r"\b(?:scratch_(?:load|store)|buffer_(?:load|store)|s_swappc)\w*", text) == []
    spills = re.findall(r"\.symbol: +(\w+)\.kd\n(?:.+\n)*? +\.vgpr_spill_count: (\d+)", text)
    assert len(spills) == text.count(".vgpr_spill_count:")
    # To other registers: sweeps on record, whose product in plain arithmetic takes them all.
    spilling = {readable(symbol) for symbol, count in spills if count != "0"}
    assert [name for name in spilling if name.endswith("_off") or not name.startswith(("gemm_k2", "gemm_k4"))] == []


# What a release and an acquire of a 64-bit flag look like, in this order with nothing but arithmetic in between: caches
# written back before the store, invalidated after the load.
AMD_RELEASE = {
    "gfx942": (r"buffer_wbl2 sc0 sc1", r"s_waitcnt vmcnt\(0\)", r"(global|flat)_store_dwordx2 .* sc0 sc1"),
    "gfx90a": (r"buffer_wbl2$", r"s_waitcnt vmcnt\(0\)", r"(global|flat)_store_dwordx2 "),
}
AMD_ACQUIRE = {
    "gfx942": (r"(global|flat)_load_dwordx2 .* sc0 sc1", r"s_waitcnt vmcnt\(0\)", r"buffer_inv sc0 sc1"),
    "gfx90a": (r"(global|flat)_load_dwordx2 .* glc", r"s_waitcnt vmcnt\(0\)", r"buffer_invl2"),
}


def has_in_order(text: str, steps: tuple[str, ...]) -> bool:
    """Do the steps follow each other in one straight piece of code, with no other memory access between them?"""
    reached = 0
    for line in text.splitlines():
        if re.match(r"\s+" + steps[reached], line):
            reached += 1
            if reached == len(steps):
                return True
        elif re.match(r"\.LBB|\s+(global|flat|buffer|scratch|s_cbranch|s_branch)", line):
            reached = int(re.match(r"\s+" + steps[0], line) is not None)
    return False


@pytest.mark.parametrize(("source", "target"), ON_AMD)
def test_amd_reads_the_clock_and_orders_with_the_system(source, target):
    kernels = amd_kernels(source, target)
    for name, text in kernels.items():
        if SIGNALS[family(name)]:
            assert has_in_order(text, AMD_RELEASE[target]), name
        if WAITS[family(name)]:
            assert has_in_order(text, AMD_ACQUIRE[target]), name
    for stem, texts in by_recorder(kernels).items():
        reads = {recorder: text.count("s_memrealtime") for recorder, text in texts.items()}
        arrived = {
            recorder: len(re.findall(r"s_memrealtime \S+\n\s+s_waitcnt lgkmcnt\(0\)", text))
            for recorder, text in texts.items()
        }
        assert reads == arrived, f"{stem}: a clock read that nothing waits for"
        assert all(reads[recorder] > reads["off"] for recorder in reads if recorder != "off"), stem


@pytest.mark.parametrize("name", ["recorder.cu", "links.cu"])
def test_programs_of_benchmarks_compile(name):
    compile_cached((*NVCC, "-ptx"), ROOT / "benchmarks" / name, f".{name}.ptx")  # also checks what the host runs


@pytest.mark.soak
@pytest.mark.parametrize("source", ["python_api_cuda.cu", "apis/cuda.cu", "apis/capture.cu", "moe/p2p/bindings.cu"])
def test_the_host_side_of_the_gpu_build_compiles(source):
    """Where no GPU is the extension is built without it."""
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    lenient = [word for word in NVCC if word not in ("-Werror", "all-warnings")]  # of pybind11's headers
    command = (*lenient, *includes, "-DTK_KERNEL_TABLE", "-DTK_FAMILIES=FAMILY(p2p)", "-O0", "-c", f"-I{CSRC}")
    compile_cached(command, CSRC / source, f".{Path(source).stem}.o")
