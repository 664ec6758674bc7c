"""Names of the entry points in compiled code, as tests and people write them."""

from __future__ import annotations

import functools
import re
import subprocess

from tracekern.compiled import compiled
from tracekern.moe.families import FAMILIES

_ENTRY = re.compile(
    r"void tracekern::entry<tracekern::(?P<body>\w+?)(?:::Kernel)?(?:<(?P<choices>.*)>)?, "
    r"tracekern::Recorder<(?P<traced>true|false), \(tracekern::RecordFormat\)(?P<format>\d), \d+u, "
    r"\(tracekern::Extent\)(?P<extent>\d)> ?>"
)
_FORMATS = ("span", "ring", "cycles")
_MESSAGES = {"true": "fp8", "false": "bf16"}
_RESULTS = {"tracekern::ResultOfEachChoice": "dedup", "tracekern::SumOfEachRank": "reduce"}
_NUMBERS = {"float": "fp32", "tracekern::Half": "fp16", "tracekern::BFloat16": "bf16"}


@functools.cache
def readable(symbol: str) -> str:
    """The name of a kernel, such as "p2p_combine_send_flag_bf16_off"; one that is no entry<> keeps its symbol."""
    demangled = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout.strip()
    found = _ENTRY.match(demangled)
    if found is None:
        return symbol
    words = re.sub(r"(?<=[a-z0-9P])(?=[A-Z][a-z])", "_", found["body"]).lower()
    family = next(name for name in (*FAMILIES, "gemm") if words.startswith(f"{name}_"))
    choices = {choice.strip() for choice in (found["choices"] or "").split(",")}
    variants = list(getattr(compiled(family), "variants", ()))  # one without has ways of staging
    variants += getattr(compiled(family), "stagings", [])
    stages = [int(choice.rpartition(")")[2]) for choice in choices if "Stage)" in choice]
    own_staging = [words.rpartition("_")[2]] if words.rpartition("_")[2] in variants else []
    if stages:  # one body for several kernels
        words = f"{family}_{compiled(family).stages[stages[0]]}"
    variant = [
        variants[int(choice.rpartition(")")[2])] for choice in choices if "Variant)" in choice or "Staging)" in choice
    ]
    variant += own_staging
    variant += [_RESULTS[choice] for choice in choices if choice in _RESULTS]
    variant += ["steps"] if any(choice.endswith("Detail)1") for choice in choices) else []
    number = [_NUMBERS[choice] for choice in choices if choice in _NUMBERS]
    number += [_MESSAGES[choice] for choice in choices if choice in _MESSAGES]
    recorder = _FORMATS[int(found["format"])] if found["traced"] == "true" else "off"
    recorder = "whole" if found["extent"] == "1" else recorder
    return "_".join([words, *variant, *number, recorder])


def untraced(name: str) -> str:
    """The kernel that runs where this one's records are not wanted; one of steps is there for them alone."""
    return name.rsplit("_", 1)[0].removesuffix("_steps") + "_off"
