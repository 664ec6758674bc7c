"""A process with an engine and memory that others write to; tests kill it, stop it and ask it.

    python fabric_peer.py PROVIDER SOURCE[,SOURCE...] BYTES LIMIT_S

Prints the memory's descriptor. A line of its input is a request, a line of its output the answer: `unregister`,
`register` (answers the descriptor), `address`, `sum` (of the bytes), `fill N` (each byte), `counted N` (immediate N),
`child fork` and `child exec` (answer its pid), `write DESCRIPTOR` (answers what the transfer ended with), `submit
DESCRIPTOR TIMES` (answers at once; all through the last domain), `stop`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time

from tracekern.fabric import (
    DomainGroupRouting,
    DoneFlag,
    MemoryRegionDescriptor,
    MemoryRegionHandle,
    Net,
    TransferEngine,
    TransferError,
)

LIMIT_S = 30.0


class Target:
    """The engine and its memory."""

    def __init__(self, provider: str, sources: str, num_bytes: int, limit_s: float) -> None:
        nets = [Net(provider, source) for source in sources.split(",")]
        self.engine = TransferEngine.builder().add_domains(nets).transfer_limit(limit_s).build()
        self.memory = mmap.mmap(-1, num_bytes)
        self.counts = [0] * 10
        self.engine.set_imm_callback(self.count)
        self.handle: MemoryRegionHandle

    def count(self, imm: int) -> None:
        self.counts[imm] += 1

    def register(self) -> str:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.handle, descriptor = self.engine.register_memory(address, len(self.memory), self.memory)
        return descriptor.to_bytes().hex()

    def submit(self, dst: MemoryRegionDescriptor, routing: DomainGroupRouting) -> DoneFlag:
        done = DoneFlag()
        self.engine.submit_write(self.handle, dst, len(self.memory), imm=1, routing=routing, on_done=done)
        return done

    def write(self, dst: MemoryRegionDescriptor) -> str:
        done = self.submit(dst, DomainGroupRouting.round_robin())
        with contextlib.suppress(TransferError):
            done.wait(LIMIT_S)
        return str(done.error)

    def answer(self, request: str, *arguments: str) -> str:
        if request == "register":
            return self.register()
        if request == "unregister":
            self.engine.unregister_memory(self.handle)
        elif request == "write":
            return self.write(MemoryRegionDescriptor(bytes.fromhex(arguments[0])))
        elif request == "submit":
            for _ in range(int(arguments[1])):
                last = DomainGroupRouting.pinned(self.engine.num_domains - 1)
                self.submit(MemoryRegionDescriptor(bytes.fromhex(arguments[0])), last)
        elif request == "fill":
            self.memory[:] = bytes([int(arguments[0])]) * len(self.memory)
        elif request == "address":
            return str(self.engine.main_address)
        elif request == "sum":
            return str(sum(self.memory[:]))
        elif request == "counted":
            return str(self.counts[int(arguments[0])])
        elif request == "child":
            return str(child(arguments[0]))
        elif request == "stop":
            self.engine.stop()
        return "done"


def child(way: str) -> int:
    """Starts a child that outlives this process: a fork, or a program that closes nothing."""
    if way == "exec":
        return os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    return forked


def main(provider: str, sources: str, num_bytes: str, limit_s: str) -> None:
    target = Target(provider, sources, int(num_bytes), float(limit_s))
    print(target.register(), flush=True)
    for line in sys.stdin:
        print(target.answer(*line.split()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
