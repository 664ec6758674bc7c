"""A rank of `run moe` that misbehaves where BAD_RANK says: "2 set-up STOP" stops rank 2 when it enters the set-up.

Acts: a signal's name; "exit"; "hang", which sleeps; an errno's name, which raises that OSError; "MemoryError";
"garbage", which writes what no rank would into the store of the process group, as any user of the machine could.
Where a rank is stopped in the run, the others sleep: their kernels would give up.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

from tracekern.launcher.watch import RUN, START
from tracekern.moe.workload import worker


def main() -> int:
    rank, phase, act = os.environ["BAD_RANK"].split()
    is_bad = os.environ["RANK"] == rank
    enter = worker.enter

    def enter_badly(entered: str) -> None:
        enter(entered)
        if is_bad and entered == phase:
            misbehave(act)
        elif (entered, phase, act) == (RUN, RUN, "STOP"):
            time.sleep(1000)

    worker.enter = enter_badly
    if is_bad and phase == START:
        misbehave(act)
    return worker.main()


def misbehave(act: str) -> None:
    if act == "exit":
        sys.exit(7)
    if act == "hang":
        time.sleep(1000)
    if act == "MemoryError":
        raise MemoryError
    if act == "garbage":
        write_garbage(os.environ["TRACEKERN_STORE"], f"0//cpu//0/{os.environ['RANK']}")
        time.sleep(2)
        return
    if act.startswith("E"):
        number = getattr(errno, act)
        raise OSError(number, os.strerror(number))
    os.kill(os.getpid(), getattr(signal, f"SIG{act}"))


def write_garbage(store: str, key: str) -> None:
    """Sets what a rank tells the others to nonsense; key: as gloo calls it."""
    from torch.distributed import TCPStore

    host, port = store.split(":")
    TCPStore(host, int(port), is_master=False, wait_for_workers=False).set(key, "garbage")
