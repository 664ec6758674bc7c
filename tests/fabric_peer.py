"""A process with an engine and memory that others write to; tests kill it, stop it and ask it.

    python fabric_peer.py PROVIDER SOURCE BYTES

Prints the memory's descriptor. A line of its input is a request, a line of its output the answer: `unregister`,
`register` (answers the descriptor), `address`, `sum` (of the bytes), `counted N` (immediate N), `write DESCRIPTOR`
(answers what the transfer ended with), `stop`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

from tracekern.fabric import (
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

    def __init__(self, provider: str, source: str, num_bytes: int) -> None:
        self.engine = TransferEngine.builder().add_domains([Net(provider, source)]).build()
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

    def write(self, dst: MemoryRegionDescriptor) -> str:
        done = DoneFlag()
        self.engine.submit_write(self.handle, dst, len(self.memory), imm=1, on_done=done)
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
        elif request == "address":
            return str(self.engine.main_address)
        elif request == "sum":
            return str(sum(self.memory[:]))
        elif request == "counted":
            return str(self.counts[int(arguments[0])])
        elif request == "stop":
            self.engine.stop()
        return "done"


def main(provider: str, source: str, num_bytes: str) -> None:
    target = Target(provider, source, int(num_bytes))
    print(target.register(), flush=True)
    for line in sys.stdin:
        print(target.answer(*line.split()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
