"""What the compiler makes of the bundled kernels: registers, spilled bytes, and bytes of code.

    python benchmarks/kernel_code.py                    # of this checkout
    python benchmarks/kernel_code.py --beside TREE      # and of another one, with ratios

The untraced bodies for bf16, compiled for sm_90 with the nvcc on the PATH; no GPU is needed. Code counts all that an
entry point calls, cold paths included.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import ROOT, Table, write_results

FLAGS = ("-arch=sm_90", "-std=c++20", "-DTK_ONE_NUMBER", "-DTK_FORMATS=RecordFormat::span", "-cubin", "-Xptxas", "-v")
KERNEL = re.compile(
    r"P2P(DispatchSend|DispatchRecv|ScaleExperts|CombineSend|CombineRecv|DispatchCombine|Dispatch|Combine)\b"
)
VARIANTS = {"P2PVariant)0": "flag", "P2PVariant)1": "token", "P2PVariant)2": "fused", "P2PVariant)3": "balanced"}
VARIANTS |= {"ResultOfEachChoice": "dedup", "SumOfEachRank": "reduce", "DispatchCombine": "pipelined"}


def code_sizes(cubin: bytes) -> dict[str, int]:
    """Entry point -> bytes of its section in an ELF file of 64 bits."""
    offset, entry_bytes, count, names_at = (
        *struct.unpack_from("<Q", cubin, 40),
        *struct.unpack_from("<3H", cubin, 58),
    )
    sections = [struct.unpack_from("<2I4Q", cubin, offset + i * entry_bytes) for i in range(count)]
    names = sections[names_at][4]
    sizes = {}
    for name_at, _, _, _, _, num_bytes in sections:
        start = names + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            sizes[name.removeprefix(".text.")] = num_bytes
    return sizes


def short_name(symbol: str) -> str:
    """`reduce combine` of the entry point's symbol; "" for what is traced or no kernel of ours."""
    name = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout
    kernel, variant = KERNEL.search(name), [VARIANTS[word] for word in VARIANTS if word in name]
    if kernel is None or "Recorder<(bool)1" in name:
        return ""
    stage = re.sub(r"(?<!^)(?=[A-Z])", "_", kernel[1]).lower()
    return " ".join([*variant, stage])


def compile_kernels(tree: Path) -> dict[str, dict[str, int]]:
    """Kernel -> registers, spilled bytes, bytes of code."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        source = tree / "csrc" / "moe" / "p2p" / "kernels.cu"
        command = ["nvcc", *FLAGS, f"-I{tree / 'csrc'}", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"kernel_code: {tree} does not compile: {done.stderr[:2000]}")
        sizes = code_sizes(cubin.read_bytes())
    found = {}
    reports = re.finditer(
        r"entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        done.stderr,
        re.DOTALL,
    )
    for symbol, stores, loads, registers in (match.groups() for match in reports):
        if name := short_name(symbol):
            spilled = int(stores) + int(loads)
            found[name] = {"registers": int(registers), "spilled_bytes": spilled, "code_bytes": sizes[symbol]}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout")
    options = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("kernel_code: nvcc is not on the PATH; install the CUDA toolkit")
        return 2
    ours = compile_kernels(ROOT)
    other = compile_kernels(options.beside) if options.beside else {}
    table = Table("sm_90, bf16, untraced", ["kernel", "registers", "spilled", "code", "beside", "code there", "ratio"])
    for name, row in sorted(ours.items()):
        there: dict[str, Any] = other.get(name, {})
        table.add(
            name,
            str(row["registers"]),
            str(row["spilled_bytes"]),
            str(row["code_bytes"]),
            f"{there['registers']} / {there['spilled_bytes']}" if there else "-",
            str(there["code_bytes"]) if there else "-",
            f"{row['code_bytes'] / there['code_bytes']:.2f}" if there else "-",
        )
    table.print()
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout.splitlines()[-1]
    write_results("kernel_code", {"compiler": version, "kernels": ours, "beside": other})
    return 0


if __name__ == "__main__":
    sys.exit(main())
