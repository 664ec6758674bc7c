"""Warps of the CPU backend have stacks of their own."""

from __future__ import annotations

import signal
import subprocess

from toolchains import program


def test_a_stack_that_overflows_spoils_no_other():
    assert subprocess.run([program("overflow", "-O1")], timeout=60).returncode == -signal.SIGSEGV
