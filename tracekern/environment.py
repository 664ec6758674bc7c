"""The environment variables TRACEKERN_*: all that is read, numbers among them, and what is misspelt."""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
from collections.abc import Mapping

from tracekern.errors import BadInput

_PREFIX = "TRACEKERN_"
NAMES = (
    *("CAPTURE", "CAPTURE_OPTIONS", "RECORDING"),
    *(
        "FABRIC_CAPTURE",
        "FABRIC_RUN",
        "GROUP_TIMEOUT_S",
        "KEEP_SEGMENT",
        "LIBFABRIC",
        "MOE_CAPTURE",
        "MOE_RUN",
        "NET",
        "NUM_RESIDENTS",
        "OUT",
        "RUN_ID",
    ),
    *("SIMULATED_CLOCK", "STORE", "STORE_SOCKET"),
    *("BUILD_JOBS", "CHECKED", "CUDA", "CUDA_ARCH", "EXTENSION", "NVCC_FLAGS", "PARTS", "WERROR"),
    *("ALL_KERNELS", "ATTACKED", "BENCHMARK", "BENCHMARK_OPTIONS", "PLANTED_TREE", "RANDOM_CASES", "RESIDENT_OPTIONS"),
)
"""All that tracekern, its build, tests and benchmarks read, without TRACEKERN_; test_environment.py checks it."""

_log = logging.getLogger("tracekern")


def positive_number(name: str, default: float, env: Mapping[str, str] = os.environ) -> float:
    """Returns the number in a variable, or the default where it is not set. Raises BadInput unless it is above 0."""
    text = env.get(name, str(default))
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise BadInput(f"{name}={text}: wanted a number above 0, such as {default:g}; set it so, or unset it")
    return number


@functools.cache
def warn_of_unread() -> None:
    """Logs, once a process and on one rank, which variables of our prefix nothing reads: they may be misspelt."""
    if os.environ.get("RANK", "0") != "0" or "TRACEKERN_STORE" in os.environ:  # our launcher has warned already
        return
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in NAMES:
            close = difflib.get_close_matches(name.removeprefix(_PREFIX), NAMES, 1)
            _log.warning("%s is not read%s", name, f"; did you mean {_PREFIX}{close[0]}?" if close else "")
