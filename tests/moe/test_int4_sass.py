"""What the decoding of int4 weights costs in instructions, counted in the machine code of the hot loops."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from kept_builds import log_of
from kernel_names import readable
from toolchains import CSRC, compile_sm_90

pytestmark = [pytest.mark.compilers, pytest.mark.programs("csrc/moe/gemm/kernels.cu", rotates=False)]

SOURCE = CSRC / "moe" / "gemm" / "kernels.cu"
# One pipe of an SM makes these, and all of a decoding but its products, which IMAD and HFMA2 make on other pipes.
INTEGERS = {"LOP3", "SHF", "PRMT", "LEA", "ISETP", "SEL", "IADD3", "VIADD", "IMNMX", "VIMNMX", "BMSK", "SGXT", "PLOP3"}
INSTRUCTION = re.compile(
    r"^(?P<label>\.L_\w+):|/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?(?P<text>[A-Z].*?)\s*;", re.MULTILINE
)
BACKWARD = re.compile(r"BRA\b.*`\((\.L_\w+)\)")
SPARSE = re.compile(r"HMMA\.SP\.16832|HGMMA\.SP\.64x(?P<tokens>\d+)x32")

MOST_INTEGERS = {
    "gemm_k2_wide_off": 6,
    "gemm_k4_wide_off": 6,
    "gemm_k2_many_wide_off": 6,
    "gemm_k2_ring_off": 6,
    "gemm_k4_ring_off": 6,
    # Has 8 tokens alone to spread a decoding over.
    "gemm_k2_reg_off": 9.5,
    "gemm_k4_reg_off": 9.5,
}
"""Kernel -> of a product, in the loop of its widest tile."""


def products(instruction: str) -> int:
    """How many products of 16 rows, 8 tokens and 32 channels an instruction makes for the warp that issues it.

    One of a warpgroup has 64 rows, 16 of them its own.
    """
    found = SPARSE.match(instruction)
    if found is None:
        return 0
    return int(found["tokens"] or 8) // 8


def loops(sass_text: str) -> Iterator[tuple[int, int, list[str]]]:
    """Begin, end and instructions of each loop: from where its backward branches go to the last of them."""
    at: dict[str, int] = {}
    last: dict[int, int] = {}
    code: list[str] = []
    for found in INSTRUCTION.finditer(sass_text):
        if found["label"]:
            at[found["label"]] = len(code)
            continue
        branch = BACKWARD.match(found["text"])
        if branch and branch[1] in at:
            last[at[branch[1]]] = len(code)
        code.append(found["text"])
    for begin, end in last.items():
        yield begin, end, code[begin : end + 1]


def hot_loop(sass_text: str) -> list[str]:
    """The instructions of the loop with the most products of those that have no other loop with products inside."""
    busy = [loop for loop in loops(sass_text) if sum(map(products, loop[2]))]
    innermost = [
        code
        for begin, end, code in busy
        if not any(begin <= other[0] and other[1] <= end for other in busy if other[2] is not code)
    ]
    assert innermost, "no loop has a sparse product"
    return max(innermost, key=lambda code: (sum(map(products, code)), -len(code)))


def integers_per_product(sass_text: str) -> float:
    """Integer instructions for each product of 16 rows, 8 tokens and 32 channels in the hot loop of one kernel."""
    code = hot_loop(sass_text)
    integers = sum(re.split(r"[.\s]", instruction, maxsplit=1)[0] in INTEGERS for instruction in code)
    return integers / sum(map(products, code))


@functools.cache
def sass_kernels() -> dict[str, str]:
    """Kernel -> its machine code."""
    _, compiled = compile_sm_90(SOURCE)
    if shutil.which("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed (CUDA toolkit)")
    text = subprocess.run(["nvdisasm", "-c", compiled], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\.text\.(\w+):", text, flags=re.MULTILINE)[1:]
    return dict(zip(map(readable, parts[::2]), parts[1::2], strict=True))


def test_instructions_are_counted_in_the_innermost_loop_with_products():
    text = """
.L_x_0:
        /*0000*/                   LOP3.LUT R0, R0, 0x3, RZ, 0xc0, !PT ;
.L_x_1:
        /*0010*/                   PRMT R1, R1, 0x5410, R2 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/              @!P0 SHF.R.U32.HI R0, RZ, 0x1, R2 ;
        /*0040*/                   IMAD.MOV.U32 R1, RZ, RZ, R2 ;
        /*0050*/                   HMMA.SP.16832.F32.BF16 R36, R40, R36, RZ, R68, 0x0 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   LOP3.LUT R0, R0, 0x3, RZ, 0xc0, !PT ;
        /*0080*/                   HGMMA.SP.64x64x32.F32.BF16 R24, R20, gdesc[UR4], RZ, !UPT ;
        /*0090*/               @P1 BRA `(.L_x_2) ;
        /*00a0*/                   HMMA.SP.16832.F32.BF16 R36, R40, R36, RZ, R68, 0x0 ;
        /*00b0*/                   BRA `(.L_x_0) ;
"""
    assert integers_per_product(text) == 2 / 9


@pytest.mark.parametrize(("kernel", "wanted"), [("gemm_k2_direct_off", 19.2), ("gemm_k4_direct_off", 20.5)])
def test_direct_decodes_with_about_twenty_instructions(kernel, wanted):
    """What the others are measured by, and that the count itself is right."""
    assert integers_per_product(sass_kernels()[kernel]) == pytest.approx(wanted, abs=1)


@pytest.mark.parametrize("kernel", MOST_INTEGERS)
def test_prepared_weights_are_decoded_with_few_instructions(kernel):
    assert integers_per_product(sass_kernels()[kernel]) <= MOST_INTEGERS[kernel]


def test_ptxas_lets_products_of_a_warpgroup_overlap():
    """C7510 and its neighbours: where it does not see which registers are in use, each product waits for the last."""
    log = log_of(compile_sm_90(SOURCE)[1]).read_text()
    assert "Compiling entry function" in log
    assert re.findall(r".*(?:C75\d\d|wgmma.*serialized).*", log) == []
