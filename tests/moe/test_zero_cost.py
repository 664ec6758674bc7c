"""Off costs nothing: every bundled kernel is byte-identical to one whose source has no tracing macro."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from elf import functions, read_sections
from kept_builds import log_of
from kernel_names import readable, untraced
from strip_tracing import copy_stripped, stripped
from toolchains import CSRC, GXX, ROOT, SAMPLE, compile_cached, compile_sm_90, hip_command

SOURCES = [str(path.relative_to(CSRC)) for path in sorted(CSRC.rglob("kernels.cu"))]
OF_AMD = ("comm/kernels.cu", "moe/low_latency/kernels.cu", "trace/kernels.cu")


@pytest.fixture(scope="module")
def never_traced(tmp_path_factory) -> Path:
    return copy_stripped(CSRC, tmp_path_factory.mktemp("stripped") / "csrc")


def assert_same(ours: dict[str, object], never: dict[str, object]) -> None:
    """Every untraced kernel is the same, and the comparison can tell: every traced one is not."""
    off = [name for name in ours if name.endswith("_off")]
    assert off
    assert sorted(off) == sorted(name for name in never if name.endswith("_off"))
    assert [name for name in off if ours[name] != never[name]] == []
    traced = [name for name in ours if name.endswith(("_span", "_whole", "_ring", "_cycles"))]
    assert traced
    same = [name for name in traced if ours[name] == ours[untraced(name)]]
    assert same == [], "traced kernels that do not trace"


def cuda_kernels(cubin: Path) -> dict[str, object]:
    """Kernel -> its code and what ptxas says of registers, stack, barriers and memory."""
    sections = read_sections(cubin)
    properties = dict(
        re.findall(
            r"Compiling entry function '(\w+)' for 'sm_90a'\n(.*?)(?=ptxas info\s*: Compil|\Z)",
            re.sub(r"Compile time = .*", "", log_of(cubin).read_text()),
            flags=re.DOTALL,
        )
    )
    texts = {name[len(".text.") :]: section.data for name, section in sections.items() if name.startswith(".text.")}
    assert sorted(texts) == sorted(properties)
    return {readable(name): (texts[name], properties[name]) for name in texts}


@pytest.mark.programs(rotates=False)
@pytest.mark.compilers
@pytest.mark.parametrize("source", SOURCES)
def test_sm_90(never_traced, source):
    _, ours = compile_sm_90(CSRC / source)
    # The stripped source leaves values unused that only a record carried.
    _, never = compile_sm_90(never_traced / source, include=never_traced, strict=False)
    assert_same(cuda_kernels(ours), cuda_kernels(never))


def amd_kernels(assembly: Path) -> dict[str, object]:
    """Kernel -> its code and descriptor: registers, scratch, shared memory."""
    # Labels and comments count the functions of the file, and the stripped one has fewer.
    text = re.sub(r"BB\d+_", "BB_", assembly.read_text())
    bodies = re.findall(r"^(\w+): +; @\1\n(.*?)^\.Lfunc_end\d+:", text, flags=re.MULTILINE | re.DOTALL)
    return {readable(name): re.sub(r" *;.*", "", body) for name, body in bodies}


# What a macro leaves behind is seen in any family, once for each compiler; nvcc has all of them.
@pytest.mark.programs(rotates=False)
@pytest.mark.compilers
@pytest.mark.parametrize(
    "source", [pytest.param(name, marks=[] if name in OF_AMD else [pytest.mark.soak]) for name in SOURCES]
)
def test_gfx942(never_traced, source):
    command = (*hip_command("gfx942"), "-S")
    ours = compile_cached(command, CSRC / source, ".gfx942.s")
    lenient = tuple(word for word in command if word != "-Werror")
    never = compile_cached(lenient, never_traced / source, ".gfx942.s", never_traced)
    assert_same(amd_kernels(ours), amd_kernels(never))


@pytest.mark.programs("tests/cpp/cpu_kernels.cpp", rotates=False)
@pytest.mark.compilers
def test_gxx(never_traced):
    source = ROOT / "tests" / "cpp" / "cpu_kernels.cpp"
    command = (*(word for word in GXX if not word.startswith("-W")), "-O2", "-ffunction-sections", *SAMPLE, "-c")
    ours = functions(compile_cached(command, source, ".o"))
    never = functions(compile_cached((*command, "-DTK_UNTRACED"), source, ".o", never_traced))
    assert_same(ours, never)


def test_the_stripper_takes_all_and_no_more():
    source = """template <class Rec>
TK_DEVICE bool f(Warp& warp, Rec& recorder, int x) {
    {
        TK_WAIT(recorder, Event::wait, g(x, (1)));
        if (ok) {
            TK_END(h(x));
        }
        TK_END_AFTER_BARRIER(warp);
        keep(x);
    }
}
"""
    assert re.sub(r"\s+", " ", stripped(source)) == (
        "template <class Rec> TK_DEVICE bool f(Warp& warp, Rec& recorder, int x) "
        "{ { if (ok) { } warp.block_sync(); keep(x); } } "
    )
