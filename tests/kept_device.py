"""A device on the CPU whose mirror a keeper holds: all is real, but for a file in the place of the GPU's memory."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.captures import EVENT_TABLE
from tests.kernels import run_kernel
from tracekern.comm.devices.device import HostDevice, HostMemory
from tracekern.record.session import Capture
from tracekern.segment import keeper
from tracekern.segment.writer import SegmentWriter

# What the keeper's process finds as tracekern._cuda.
STAND_IN = """
import ctypes, os, sys, time, types

class KeptMirror:
    def __init__(self, device, descriptor, num_bytes):
        if "KEEPER_FAILS" in os.environ:
            raise RuntimeError(os.environ["KEEPER_FAILS"]) if os.environ["KEEPER_FAILS"] else SystemExit
        time.sleep(float(os.environ.get("KEEPER_STARTS_IN_S", 0)))
        self.descriptor = os.dup(descriptor)

    def copy(self, arena, offset, num_bytes):
        time.sleep(float(os.environ.get("KEEPER_COPIES_IN_S", 0)))
        ctypes.memmove(arena + offset, os.pread(self.descriptor, num_bytes, offset), num_bytes)

sys.modules["tracekern._cuda"] = types.ModuleType("tracekern._cuda")
sys.modules["tracekern._cuda"].KeptMirror = KeptMirror
"""


def leave_stand_in(directory: Path) -> Path:
    """A folder for PYTHONPATH: the keeper's process inherits that, and runs what stands there first of all."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(STAND_IN)
    return directory


class KeptDevice(HostDevice):
    """Its kernels write into the mirror; when it is `lost`, only the keeper reaches that."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = KeptMemory()


class KeptMemory(HostMemory):
    lost = ""

    def __init__(self) -> None:
        self.mirror = self

    def attach(self, segment: SegmentWriter) -> None:
        self.descriptor = os.memfd_create("mirror")
        self._num_bytes = int(segment.header["arena_bytes"])
        os.ftruncate(self.descriptor, self._num_bytes)
        self._mirror = np.frombuffer(mmap.mmap(self.descriptor, self._num_bytes), np.uint8)
        self._arena = segment.address + int(segment.header["arena_offset"])
        self.keeper: keeper.Keeper | None = None

    def start_keeper(self, segment: SegmentWriter) -> str:
        try:
            self.keeper = keeper.Keeper(segment, "no device", self.descriptor, self._num_bytes)
        except RuntimeError as error:
            return str(error)
        return ""

    def offset(self) -> int:
        return (self._mirror.ctypes.data - self._arena) % (1 << 64)

    def collect(self, segment: SegmentWriter) -> None:
        arena_offset = int(segment.header["arena_offset"])

        def copy_part(offset: int, num_bytes: int) -> None:
            at = arena_offset + offset
            segment._bytes[at : at + num_bytes] = self._mirror[offset : offset + num_bytes]

        def copy() -> None:
            if self.lost:
                raise RuntimeError(self.lost)
            keeper.collect_mirrored(segment, copy_part)

        keeper.collect_or_let(segment, copy, self.keeper)

    def detach(self, is_written: bool = False) -> None:
        if self.keeper is not None:
            self.keeper.release()
        os.close(self.descriptor)


def record(session: Capture, spans: int = 3) -> bool:
    """One launch."""
    launch = session.launch("demo", grid=2, warps=2, events=json.dumps(EVENT_TABLE))
    if launch.traced:
        run_kernel(launch.descriptor, 2, 2, spans)
    return launch.traced


def fork(run: Callable[[], None]) -> int:
    """A child that runs this and nothing else; its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return pid
