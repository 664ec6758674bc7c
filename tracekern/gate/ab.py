"""Launches base and head alternately in one job, so that noise of the machine affects both alike."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tracekern.errors import BadInput
from tracekern.formatting import argument
from tracekern.gate.compare import Rules, losses_of, sides_differ
from tracekern.gate.run import Run, read_run

PLACEHOLDER = "{out}"
VARIABLE = "TRACEKERN_OUT"


@dataclass(frozen=True)
class Turn:
    side: str  # "base" | "head"
    directory: Path
    """Where the command leaves its capture."""
    counts: bool = True
    """False for a warm-up."""


@dataclass
class Sides:
    """The runs of the turns that count."""

    base: list[Run] = field(default_factory=list)
    head: list[Run] = field(default_factory=list)
    problems: tuple[str, ...] = ()
    """Why no verdict is possible. The turns after the one that showed it were not launched."""


def turns(num_runs: int, directory: Path, warm_ups: int = 0) -> list[Turn]:
    """Returns the turns base, head, head, base, ...: a slow drift adds the same to both sides."""
    order = [side for _ in range(warm_ups) for side in ("base", "head")]
    result = [Turn(side, directory / f"{side}_warm_up_{i // 2:02}", counts=False) for i, side in enumerate(order)]
    for pair in range(num_runs):
        sides = ("base", "head") if pair % 2 == 0 else ("head", "base")
        result += [Turn(side, directory / f"{side}_{pair:02}") for side in sides]
    return result


def run_turns(
    todo: list[Turn],
    commands: Mapping[str, str],
    rules: Rules,
    *,
    unaligned: bool = False,
    timeout_s: float | None = None,
    on_progress: Callable[[int, Turn], None] | None = None,
) -> Sides:
    """Runs the shell command of each turn and reads its capture.

    commands: side -> command line. {out} in it is replaced by the directory, which TRACEKERN_OUT names as well.
    on_progress(number, turn): called before each turn. Raises BadInput for a command that fails or leaves no capture.
    """
    sides, first = Sides(), None
    for number, turn in enumerate(todo):
        if on_progress:
            on_progress(number, turn)
        turn.directory.mkdir(parents=True)
        _run(turn, commands[turn.side].replace(PLACEHOLDER, shlex.quote(argument(turn.directory))), timeout_s)
        if not any(turn.directory.glob("rank_*.tkdump")):
            raise BadInput(
                f"{turn.side} left no capture in {turn.directory} (no rank_*.tkdump); its command has to capture into "
                f"{PLACEHOLDER}, or into the directory that {VARIABLE} names: {commands[turn.side]}"
            )
        run = read_run(turn.directory, unaligned)
        first = first or run
        lost = losses_of([run]) if turn.counts else ()
        sides.problems = (*lost, *sides_differ(first, run, rules))
        if sides.problems:
            break
        if turn.counts:
            (sides.base if turn.side == "base" else sides.head).append(run)
    return sides


def _run(turn: Turn, command: str, timeout_s: float | None) -> None:
    log = turn.directory / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, VARIABLE: argument(turn.directory)},
            start_new_session=True,  # so that all processes of the command can be ended
        )
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise BadInput(
                f"{turn.side} took longer than {timeout_s:g} s{_last_line(log)}; command: {command}"
            ) from None
        finally:
            _end(process)
    if returncode:
        raise BadInput(f"{turn.side} ended with {returncode}{_last_line(log)}; command: {command}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f", saying {said[:200]!r}" if said else ""
