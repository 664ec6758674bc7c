"""What compilers made, kept in build/tests, so that a second run of the tests compiles nothing.

An entry is named by a hash of the command, the compiler's version and every file that the sources include. As a
program, `kept_builds.py g++ ARGUMENTS...` is that compiler, see compilers_that_keep().
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / "build" / "tests"
COMPILERS = ("g++", "nvcc", "clang++-19")
KEPT_S = 14 * 86_400
"""Time that an entry stays which no test asks for."""
QUICK = "TESTS_QUICK"
"""Variable under which a program that calls a compiler gets -O0 for -O2."""

_BIN = CACHE / "bin"
_SOURCES = {".c", ".cpp", ".cu"}
_INCLUDE = re.compile(rb'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)


def _path() -> str:
    """PATH without what compilers_that_keep() put there."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder != str(_BIN))


@functools.cache
def compiler(name: str) -> str | None:
    """Returns the path of the compiler itself; None if it is missing."""
    return shutil.which(name, path=_path())


@functools.cache
def _version(name: str) -> bytes:
    return subprocess.run([compiler(name) or name, "--version"], capture_output=True, check=True).stdout


def included_files(sources: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
    """The sources, and every file beside them or in `folders` that they include, directly or not.

    Headers elsewhere are the compiler's own, which its version stands for.
    """
    found: dict[Path, None] = {}
    stack = list(sources)
    while stack:
        path = stack.pop()
        if path in found:
            continue
        found[path] = None
        for name in map(os.fsdecode, _INCLUDE.findall(path.read_bytes())):
            candidates = (folder / name for folder in (path.parent, *folders))
            stack += [candidate for candidate in candidates if candidate.is_file()][:1]
    return list(found)


@dataclass(frozen=True)
class Build:
    """What became of a command, and where the file that it made is kept."""

    returncode: int
    stderr: str
    result: Path


def log_of(result: Path) -> Path:
    """Returns the file that holds what the compiler said."""
    return result.with_name(result.name + ".log")


def _fingerprint(command: Sequence[str], sources: Sequence[Path]) -> str:
    # The same files in another place are the same: tests compile copies.
    folders = [Path(word[2:]) for word in command if word.startswith("-I")]
    flags = [word for word in command if not word.startswith("-I")]
    hashed = hashlib.sha256(repr((flags, _version(command[0]))).encode())
    for path in included_files(sources, folders):
        hashed.update(path.name.encode() + path.read_bytes())
    return hashed.hexdigest()[:20]


def build(command: Sequence[str], sources: Sequence[Path], suffix: str = "") -> Build:
    """Runs `command -o RESULT sources` unless that was done before. What a compiler refuses is not kept."""
    CACHE.mkdir(parents=True, exist_ok=True)
    result = CACHE / f"{sources[0].stem}-{_fingerprint(command, sources)}{suffix}"
    with result.with_name(result.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if log_of(result).exists():
            for path in (result, log_of(result)):
                with contextlib.suppress(FileNotFoundError):  # of -fsyntax-only there is no result
                    os.utime(path)
            return Build(0, log_of(result).read_text(), result)
        partial = result.with_name(f"{result.stem}.{os.getpid()}{suffix}")
        words = [compiler(command[0]) or command[0], *command[1:], "-o", str(partial), *map(str, sources)]
        # A compiler may be a wrapper that looks for the next one of its name.
        environment = {**os.environ, "PATH": _path()}
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            with contextlib.suppress(FileNotFoundError):
                partial.rename(result)
            log_of(result).write_text(done.stderr)
    return Build(done.returncode, done.stderr, result)


def compilers_that_keep() -> Path:
    """A folder for the front of PATH: its compilers are those of this machine, and keep what they made."""
    _BIN.mkdir(parents=True, exist_ok=True)
    for name in COMPILERS:
        script = _BIN / name
        if compiler(name) is None:
            script.unlink(missing_ok=True)
            continue
        words = shlex.join([sys.executable, "-I", "-S", __file__, name])
        partial = script.with_name(f"{name}.{os.getpid()}")
        partial.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        partial.chmod(0o755)
        partial.rename(script)
    return _BIN


def remove_old() -> None:
    """Removes what no test has asked for in a while."""
    oldest = time.time() - KEPT_S
    for path in CACHE.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()


def main(name: str, arguments: Sequence[str]) -> int:
    """One call of a compiler. What is not made of sources alone, such as a program of object files, is not kept."""
    command, sources, output = [name], [], ""
    words = iter(arguments)
    for word in words:
        if word == "-o":
            output = next(words, "")
        elif word == "-I":
            command.append("-I" + next(words, ""))
        elif Path(word).suffix in _SOURCES and not word.startswith("-"):
            sources.append(Path(word))
        else:
            command.append("-O0" if word == "-O2" and QUICK in os.environ else word)
    has_other_files = "-include" in command or any(os.path.isfile(word) for word in command[1:])
    if has_other_files or not sources or not (output or "-fsyntax-only" in command):
        real = compiler(name) or name
        os.execve(real, [real, *arguments], {**os.environ, "PATH": _path()})  # g++ looks for its parts beside its name
    done = build(command, sources, Path(output).suffix)
    sys.stderr.write(done.stderr)
    if done.returncode == 0 and output:
        shutil.copy(done.result, output)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
