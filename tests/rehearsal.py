"""Rehearses a network that is not here: tcp with another provider's rules.

`pytest --rehearse efa tests/fabric` does so for all engines.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kept_builds import build

RULES = {"efa": Path(__file__).parent / "cpp" / "efa_rules.cpp"}
"""By provider: a libfabric in front of the real one."""
COMMAND = ("g++", "-std=c++20", "-shared", "-fPIC", "-O2", "-Wall", "-fno-gnu-unique")
"""Compiles such a library. The last one: a process may load several, and each has variables of its own."""


def variables(provider: str) -> dict[str, str]:
    """Returns the variables under which engines on tcp have the provider's rules."""
    from tracekern.fabric.library import find_library

    in_front = build(COMMAND, [RULES[provider]], ".so")
    assert in_front.returncode == 0, in_front.stderr
    real = os.environ.get("SHIM_LIBRARY") or find_library() or "libfabric.so.1"
    return {"SHIM_LIBRARY": real, "TRACEKERN_LIBFABRIC": str(in_front.result)}


@pytest.fixture
def efa_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that are made from now on."""
    for name, value in variables("efa").items():
        monkeypatch.setenv(name, value)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--rehearse", choices=RULES, help="engines on tcp have the rules of this provider")


def rehearse(config: pytest.Config) -> None:
    if provider := config.getoption("--rehearse"):
        os.environ.update(variables(provider))
