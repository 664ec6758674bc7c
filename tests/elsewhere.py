"""Runs commands as on a system that is not Linux: python tests/elsewhere.py "info DIR" "report DIR" ...

One process runs all of them, without the modules and paths that only Linux has, and prints [exit code, output] of each.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

find = os.stat


def stat(path: Any, *rest: Any, **more: Any) -> os.stat_result:
    if str(path).startswith(("/proc", "/dev/shm")):
        raise FileNotFoundError(2, "No such file or directory", path)
    return find(path, *rest, **more)


def run(words: list[str]) -> tuple[object, str]:
    from tracekern.cli.main import main

    said = io.StringIO()
    sys.argv[1:] = words
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            return end.code or 0, said.getvalue()
    return None, said.getvalue()


if __name__ == "__main__":
    for module in ("fcntl", "grp", "pwd", "resource", "termios"):
        sys.modules[module] = None  # type: ignore[assignment]
    for name in ("geteuid", "getuid", "kill", "killpg", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "sched_getaffinity"):
        delattr(os, name)
    os.stat = stat
    print(json.dumps([run(line.split()) for line in sys.argv[1:]]))
