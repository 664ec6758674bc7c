"""The keeper: a process that maps a flight recorder's device memory too, so that it outlives the rank that records.

Records in device memory cost a kernel least, but are gone with the process that allocated them, or with its first trap.
Where another process maps the same memory they are not: a trap, an illegal access or a SIGKILL of the rank takes the
rank's mapping only. The keeper copies what was recorded into the segment when the rank says so, or dies.

    rank                                        keeper
    starts it, sends the descriptor             maps the memory, holds the segment: "ready"
    "collect"                                   copies: "done"
    closes the link, or dies                    copies, unless it has; ends

    who takes a snapshot of the rank
    connects to the socket of the segment
                                                copies: "done"

Whoever salvages a dead rank's segment waits for its keeper first (segment_names.await_segment).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.segment.names import hold_segment
from tracekern.segment.writer import SegmentWriter

START_TIMEOUT_S = 60.0
COLLECT_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 5.0
_LINE_BYTES = 4096


def collect_mirrored(segment: SegmentWriter, copy: Callable[[int, int], None]) -> int:
    """Calls copy(offset, num_bytes) for each region that was recorded in the mirror; how many there are.

    Offsets count from the arena's start.
    """
    mirrored = [entry for entry in segment.recorded_launches() if entry["flags"] & fmt.ENTRY_MIRRORED]
    for entry in mirrored:
        order = int(entry["order"])
        first = int(entry["headers_offset"])
        stop = int(entry["records_offset"]) + segment.records(entry).nbytes
        copy(first - int(segment.header["arena_offset"]), stop - first)
        if int(entry["order"]) != order:  # half of it may be the next launch's
            segment.track_headers(entry)[:] = 0
    return len(mirrored)


def collect_or_let(segment: SegmentWriter, copy: Callable[[], None], keeper: Keeper | None) -> None:
    """Lets copy() bring all of the mirror into the segment, or the keeper where that raises RuntimeError.

    So it does where a kernel has trapped, before this or while it waits for the kernel. Raises RuntimeError where
    neither can.
    """
    try:
        copy()
    except RuntimeError:
        if keeper is None:
            raise
        keeper.collect()
    else:
        segment.header["collected"] = 1


class Keeper:
    """The rank's side."""

    def __init__(self, segment: SegmentWriter, device: str, descriptor: int, num_bytes: int) -> None:
        """device: its UUID; descriptor: of the mirror. Raises RuntimeError with its reason."""
        self._link, theirs = socket.socketpair()
        arguments = (segment.name, device, str(num_bytes), str(theirs.fileno()), str(descriptor))
        try:
            # A session of its own: what ends the rank's process group must not end it. No pipe of the rank's either:
            # who reads that to its end would wait for the keeper.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments],
                env=_keeper_environment(),
                pass_fds=(theirs.fileno(), descriptor),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._link.close()
            raise RuntimeError(f"the keeper cannot be started ({error.strerror})") from None
        finally:
            theirs.close()
        try:
            self._hear("ready", START_TIMEOUT_S)
        except BaseException:
            self._end(0.0)
            raise

    def collect(self) -> None:
        """What was recorded in the mirror is in the segment. Raises RuntimeError where the keeper is gone, too."""
        try:
            self._link.sendall(b"collect\n")
        except OSError as error:
            raise RuntimeError(f"the keeper is gone ({error.strerror})") from None
        self._hear("done", COLLECT_TIMEOUT_S)

    def release(self) -> None:
        """What it holds is needed no more."""
        self._end(COLLECT_TIMEOUT_S)

    def _end(self, timeout_s: float) -> None:
        """It ends by itself in that time, or is killed."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # a close alone says nothing while forks of this process hold it
        self._link.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in a driver's call even that takes time
                self._process.wait(_KILL_TIMEOUT_S)

    def _hear(self, wanted: str, timeout_s: float) -> None:
        self._link.settimeout(timeout_s)
        try:
            said = self._link.recv(_LINE_BYTES).decode(errors="replace").strip()
        except OSError as error:
            said = f"nothing ({error})"
        if said != wanted:
            raise RuntimeError(f"the keeper said {said or 'nothing: it ended'}")


def _keeper_environment() -> dict[str, str]:
    """Ours, as far as it is true: which devices are visible may have been changed since CUDA started here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if "MIG-" not in environment.get("CUDA_VISIBLE_DEVICES", ""):  # a part of a GPU is visible only where it is named
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def keep(segment: SegmentWriter, link: socket.socket, mirror: Any) -> None:
    """The keeper's side, until the rank has no more use for it. mirror: a KeptMirror."""
    arena = segment.address + int(segment.header["arena_offset"])

    def collect() -> None:
        collect_mirrored(segment, lambda offset, num_bytes: mirror.copy(arena, offset, num_bytes))

    rank = os.pidfd_open(int(segment.header["pid"]))
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(_door_of(segment.name))
        door.listen()
        link.sendall(b"ready\n")
        while _read(link, rank, door, collect) == b"collect\n":
            collect()
            segment.header["collected"] = 1
            link.sendall(b"done\n")
    if int(segment.header["state"]) != fmt.SegmentState.CLOSED and not int(segment.header["collected"]):
        collect()
        segment.header["collected"] = 1


def _read(link: socket.socket, rank: int, door: socket.socket, collect: Callable[[], None]) -> bytes:
    """What the rank says; b"" where it is through with its capture, or dead. Forks of it may hold the link open.

    Until then whoever comes through the door is served.
    """
    while True:
        readable, _, _ = select.select([link.fileno(), rank, door.fileno()], [], [])
        if link.fileno() in readable:
            return link.recv(_LINE_BYTES)
        if rank in readable:
            return b""
        with door.accept()[0] as caller, contextlib.suppress(OSError):  # he may be gone
            if _user_of(caller) in (os.getuid(), 0):
                collect()
                caller.sendall(b"done\n")


def ask_keeper(segment_name: str) -> bool:
    """Has the keeper of a rank that runs copy what the device holds by now into the segment, from any process.

    False where there is none, or it does not answer.
    """
    with socket.socket(socket.AF_UNIX) as keeper, contextlib.suppress(OSError):
        keeper.settimeout(COLLECT_TIMEOUT_S)
        keeper.connect(_door_of(segment_name))
        return keeper.recv(_LINE_BYTES) == b"done\n"
    return False


def _door_of(segment_name: str) -> bytes:
    """The address of the socket where a keeper listens: of the kind that goes with its process.

    Addresses have room for 107 bytes, the names of files for more.
    """
    return b"\0tracekern-keeper-" + hashlib.sha256(segment_name.encode()).hexdigest().encode()


def _user_of(caller: socket.socket) -> int:
    """The user that a process at the other end of a socket belongs to."""
    _, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def main() -> int:
    name, device, num_bytes, link_fd, descriptor = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank's end is the keeper's time, and it ends by itself
    with socket.socket(fileno=int(link_fd)) as link:
        try:
            from tracekern import _cuda

            segment = SegmentWriter.attach(name)
            mirror = _cuda.KeptMirror(device, int(descriptor), int(num_bytes))
            os.close(int(descriptor))
            with hold_segment(name):
                keep(segment, link, mirror)
        except (ImportError, RuntimeError, OSError, BadInput) as error:
            with contextlib.suppress(OSError):  # the rank may be gone
                link.sendall(f"{type(error).__name__}: {error}\n".encode())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
