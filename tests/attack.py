"""Builds and runs the programs of tests/cpp that attack the protocol; shared by the tests that do so."""

from __future__ import annotations

import functools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from toolchains import GXX, IS_SAMPLE, ROOT, SAMPLE, compile_cached, formats, program

VARIANTS = ("flag", "token", "fused", "balanced", "dedup", "reduce", "pipelined", "overlapped")
NUMBERS = ("fp32", "fp16", "bf16")
SAMPLED_NUMBERS = ("bf16",) if IS_SAMPLE else NUMBERS

DELAYS = ("-DTK_RANDOM_DELAYS", "-DTK_POISON_CONSUMED")
PLANTED = ("-DTK_PLANTED_FAULTS", *DELAYS)
SLOW = ("-O2", *PLANTED, *SAMPLE)
PROMPT = "delays=off"
"""Option of a program that was built with delays."""
RACES = ("-O1", "-g1", "-fsanitize=thread", *PLANTED)
TSAN = (*RACES, *formats("span", "ring"))
RACE_EXIT = 66

RIGHT, WRONG_RESULT, USAGE, TIMED_OUT, BAD_RECORD = range(5)

NOTICED = (RACE_EXIT, WRONG_RESULT)
# Wrong counts and lapped flags end in a wait for what never comes.
WITH_TIME_OUT = (*NOTICED, TIMED_OUT)
MUTANT_TIMEOUT = "timeout_ms=1500"
SEEDS = range(1, 9)
"""Load hides a missing release from the race detector now and then; the first seed that shows it ends the test."""

FLAGGED = ("release", "acquire", "epoch", "acknowledgement")
COUNTED = (*FLAGGED, "value")
"""Faults of flags whose waits want a value of at least so much."""


@dataclass(frozen=True)
class Shape:
    """The numbers on the command line of the programs, in their order."""

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


@dataclass(frozen=True)
class Attack:
    """One way to run a program so that a fault in `sites` shows."""

    program: str
    arguments: tuple[str, ...]
    sites: tuple[str, ...]
    flags: tuple[str, ...] = TSAN
    noticed: tuple[int, ...] = NOTICED
    network: tuple[str, ...] = ()
    """What a network in the process is compiled with, where one lies between nodes."""

    def run(self, seed: int, *options: str) -> subprocess.CompletedProcess[str]:
        arguments = (argument.replace("SEED", str(seed)) for argument in self.arguments)
        network = in_process_options(*self.network) if self.network else ()
        return run_program(program(self.program, *self.flags), *arguments, *network, *options)

    def exits_until_noticed(self, site: str) -> list[int]:
        """Of one seed after the other, until one of them notices that `site` is left out."""
        exits: list[int] = []
        for seed in SEEDS:
            exits.append(self.run(seed, f"plant={site}", MUTANT_TIMEOUT).returncode)
            if exits[-1] in self.noticed:
                break
        return exits


@functools.cache
def in_process(flags: tuple[str, ...]) -> Path:
    """A libfabric whose endpoints are all in one process, and whose writes overtake each other."""
    source = ROOT / "tests" / "cpp" / "in_process_fabric.cpp"
    return compile_cached((*GXX, *flags, "-shared", "-fPIC"), source, ".so")


def in_process_options(*flags: str) -> tuple[str, ...]:
    """The options of a run over it. flags: what it is compiled with."""
    return (f"library={in_process(flags)}", "provider=in_process")


def sites(channel: str, *mutations: str) -> tuple[str, ...]:
    return tuple(f"{channel}:{mutation}" for mutation in mutations)


def assert_right(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stdout) == (RIGHT, "ok\n"), f"exit {done.returncode}\n{done.stderr[:6000]}"
