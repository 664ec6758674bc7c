"""`tracekern ARGUMENTS...` as if a span took more memory and a process none: then short captures are in windows, too.

    python tests/windowed_report.py '{"processes": 2, "kill_at": 30}' report CAPTURE --json --memory 12MB

kill_at: this process kills itself when it has made so many files. full_at: then no file can grow any more. At the end
it prints how many it has made.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import resource
import signal
import sys
from typing import Any

import tracekern.analysis.in_windows as in_windows
from tracekern.cli.main import main

BYTES_A_SPAN = 10_000
AS_IF = {"_BYTES_A_SPAN": BYTES_A_SPAN, "_BYTES_OF_A_PROCESS": 1, "_LEAST_SPANS": 10}


def count_files(kill_at: int = 0, full_at: int = 0) -> None:
    numbers, rename, made = itertools.count(1), os.replace, [0]

    def replace(*paths: Any, **options: Any) -> None:
        rename(*paths, **options)
        made[0] = next(numbers)
        if made[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if made[0] == full_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))

    os.replace = replace  # type: ignore[assignment]
    atexit.register(lambda: print("files made:", made[0], file=sys.stderr))


if __name__ == "__main__":
    about = json.loads(sys.argv.pop(1))
    processes = about.pop("processes")
    for name, value in AS_IF.items():
        setattr(in_windows, name, value)
    in_windows.usable_cores = lambda: processes  # type: ignore[attr-defined]
    count_files(**about)
    main()
