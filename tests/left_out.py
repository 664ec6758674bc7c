"""A program from a copy of the sources in which $LEFT_OUT names the barrier, or the edit, that is left out."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from attack import DELAYS
from toolchains import CSRC, GXX, ROOT, SAMPLE, compile_cached

LEFT_OUT = "LEFT_OUT"

P2P_FILES = ("comm/barrier.h", "moe/p2p/call.h", "moe/p2p/counts.h", "moe/p2p/worklog/combine.h")
LOW_LATENCY_FILES = tuple(f"moe/low_latency/{name}.h" for name in ("barriers", "dispatch"))
TWO_HOP_FILES = ("moe/two_hop/notify.h", "moe/two_hop/dispatch.h", "moe/two_hop/combine.h", "moe/two_hop/one_node.h")
INT4_RING_FILES = ("moe/gemm/stages.h", "moe/gemm/reg.h")

_WARPS = r"((?:context\.)?(?:warp|warp_group\(\))|group|casters)"
"""Those that meet: all of a block, or a group of them."""
_BARRIER = re.compile(
    rf"\b(?:{_WARPS}\.block_sync\(\)|TK_END_AFTER_BARRIER\({_WARPS}\)"
    r"|traced_barrier_if<[\w:]+>\([\w., ]+\));"
)

_CHOICE = f"""
#include <cstdlib>
#include <cstring>
inline const char* const left_out_site = std::getenv("{LEFT_OUT}");
inline bool left_out(const char* site) {{ return left_out_site && std::strcmp(left_out_site, site) == 0; }}
"""


@dataclass(frozen=True)
class Edit:
    """Another way to write a place in a file of csrc, which asks left_out("name") whether it is to be wrong."""

    file: str
    old: str
    new: str


def sites_of(edits: tuple[Edit, ...]) -> list[str]:
    """The names that edits ask for, each once."""
    return list(dict.fromkeys(name for edit in edits for name in re.findall(r'left_out\("(\w+)"\)', edit.new)))


def barriers_in(files: tuple[str, ...]) -> list[str]:
    """Where each barrier of these files of csrc stands, in the order of their numbers."""
    found = []
    for name in files:
        text = (CSRC / name).read_text()
        found += [f"{name}:{text.count(chr(10), 0, match.start()) + 1}" for match in _BARRIER.finditer(text)]
    return found


def numbered_program(directory: Path, program: str, files: tuple[str, ...], edits: tuple[Edit, ...] = ()) -> Path:
    """tests/cpp/PROGRAM.cpp for the race detector; the barriers of `files` are numbered, `edits` are made."""
    copy = directory / "csrc"
    shutil.copytree(CSRC, copy)
    numbers = iter(range(len(barriers_in(files))))

    def may_be_left_out(match: re.Match[str]) -> str:
        meets = match[1] or match[2]
        barrier = f"{meets}.block_sync()" if meets else match[0].rstrip(";")
        return f'(left_out("{next(numbers)}") ? void() : {barrier});'

    for name in files:
        (copy / name).write_text(_BARRIER.sub(may_be_left_out, (copy / name).read_text()))
    for edit in edits:
        text = (copy / edit.file).read_text()
        assert text.count(edit.old) == 1, f"{edit.file} has not one place like this:\n{edit.old}"
        (copy / edit.file).write_text(text.replace(edit.old, edit.new))
    first_header = copy / "platform" / "qualifiers.h"
    first_header.write_text(first_header.read_text() + _CHOICE)
    source = ROOT / "tests" / "cpp" / f"{program}.cpp"
    return compile_cached((*GXX, "-O1", "-g1", "-fsanitize=thread", *DELAYS, *SAMPLE), source, "", copy)
