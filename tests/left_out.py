"""A program from a copy of the sources in which $LEFT_OUT names the barrier that is left out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from attack import DELAYS
from toolchains import CSRC, GXX, ROOT, SAMPLE, compile_cached

LEFT_OUT = "LEFT_OUT"

P2P_FILES = ("comm/barrier.h", "moe/p2p/call.h", "moe/p2p/counts.h", "moe/p2p/worklog/combine.h")
LOW_LATENCY_FILES = tuple(f"moe/low_latency/{name}.h" for name in ("barriers", "dispatch", "combine"))
TWO_HOP_FILES = ("moe/two_hop/notify.h", "moe/two_hop/dispatch.h", "moe/two_hop/combine.h", "moe/two_hop/one_node.h")

_WARPS = r"((?:context\.)?warp|group|casters)"
"""Those that meet: all of a block, or a group of them."""
_BARRIER = re.compile(
    rf"\b(?:{_WARPS}\.block_sync\(\)|TK_END_AFTER_BARRIER\({_WARPS}\)|wait_(?:group|sub_warps)\(context\b[^)]*\));"
)

_CHOICE = f"""
#include <cstdlib>
inline const char* const left_out_site = std::getenv("{LEFT_OUT}");
inline bool left_out(int site) {{ return left_out_site && std::atoi(left_out_site) == site; }}
"""


def barriers_in(files: tuple[str, ...]) -> list[str]:
    """Where each barrier of these files of csrc stands, in the order of their numbers."""
    found = []
    for name in files:
        text = (CSRC / name).read_text()
        found += [f"{name}:{text.count(chr(10), 0, match.start()) + 1}" for match in _BARRIER.finditer(text)]
    return found


def numbered_program(directory: Path, program: str, files: tuple[str, ...]) -> Path:
    """tests/cpp/PROGRAM.cpp for the race detector; the barriers of `files` are numbered."""
    copy = directory / "csrc"
    shutil.copytree(CSRC, copy)
    numbers = iter(range(len(barriers_in(files))))

    def may_be_left_out(match: re.Match[str]) -> str:
        meets = match[1] or match[2]
        barrier = f"{meets}.block_sync()" if meets else match[0].rstrip(";")
        return f"(left_out({next(numbers)}) ? void() : {barrier});"

    for name in files:
        (copy / name).write_text(_BARRIER.sub(may_be_left_out, (copy / name).read_text()))
    perturb = copy / "comm" / "perturb.h"
    perturb.write_text(perturb.read_text() + _CHOICE)
    source = ROOT / "tests" / "cpp" / f"{program}.cpp"
    return compile_cached((*GXX, "-O1", "-g1", "-fsanitize=thread", *DELAYS, *SAMPLE), source, "", copy)
