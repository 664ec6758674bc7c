"""Builds and runs the programs of tests/cpp that attack the protocol; shared by the tests that do so."""

from __future__ import annotations

import functools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from toolchains import SAMPLE, program

VARIANTS = ("flag", "token", "fused", "balanced", "dedup", "reduce", "pipelined")
NUMBERS = ("fp32", "fp16", "bf16")
SAMPLED_NUMBERS = ("bf16",) if SAMPLE else NUMBERS

DELAYS = ("-DTK_RANDOM_DELAYS", "-DTK_POISON_CONSUMED")
PLANTED = ("-DTK_PLANTED_FAULTS", *DELAYS)
SLOW = ("-O1", *PLANTED, *SAMPLE)
TSAN = ("-O1", "-g1", "-fsanitize=thread", *PLANTED)  # no sample: that has no rings
RACE_EXIT = 66

RIGHT, WRONG_RESULT, USAGE, TIMED_OUT, BAD_RECORD = range(5)


@dataclass(frozen=True)
class Shape:
    """The numbers on the command line of p2p_stress, in their order."""

    ranks: int = 3
    blocks: int = 2
    warps: int = 2
    tokens: int = 8
    hidden: int = 8
    experts: int = 6
    topk: int = 2
    iterations: int = 40
    seed: int = 1

    def arguments(self) -> list[str]:
        values = (self.ranks, self.blocks, self.warps, self.tokens, self.hidden, self.experts, self.topk)
        return [str(value) for value in (*values, self.iterations, self.seed)]


@functools.cache
def _fixed_addresses() -> tuple[str, ...]:
    """gcc 12's race detector does not know every layout that a kernel may draw; where it may, setarch fixes it."""
    command = ("setarch", "-R")
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return ()
    return command if allowed else ()


def run_program(binary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": f"exitcode={RACE_EXIT} halt_on_error=1",
        "ASAN_OPTIONS": "detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1 print_stacktrace=1",
    }
    command = [*_fixed_addresses(), str(binary), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def stress(
    flags: tuple[str, ...], variant: str, number: str, executor: str, shape: Shape, *options: str
) -> subprocess.CompletedProcess[str]:
    """p2p_stress of the given build."""
    return run_program(program("p2p_stress", *flags), variant, number, executor, *shape.arguments(), *options)


def assert_right(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stdout) == (RIGHT, "ok\n"), f"exit {done.returncode}\n{done.stderr[:6000]}"
