"""The keeper: a process that maps a flight recorder's device memory too, so that it outlives the rank that records.

Records in device memory cost a kernel least, but are lost with the process that allocated them, or with its first trap.
If another process maps the same memory, they survive: a trap, an illegal access or a SIGKILL of the rank ends only the
rank's mapping. The keeper copies the records into the segment when the rank asks for it, or dies.

    rank                                        keeper
    starts it, sends the descriptor             maps the memory, holds the segment: "ready"
    "collect"                                   copies: "done"
    closes the link, or dies                    copies, unless it has; ends

    the process that takes a snapshot
    connects to the socket of the segment
                                                copies: "done"

A process that salvages a dead rank's segment waits for its keeper first (segment.names.await_segment).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.interpreter import python_call
from tracekern.segment.names import hold_segment
from tracekern.segment.peers import is_own
from tracekern.segment.writer import SegmentWriter

START_TIMEOUT_S = 60.0
COLLECT_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 5.0
_LINE_BYTES = 4096


def collect_mirrored(segment: SegmentWriter, copy: Callable[[int, int], None]) -> int:
    """Calls copy(offset, num_bytes) for each region recorded in the mirror. Returns the number of such regions.

    Offsets count from the arena's start.
    """
    mirrored = [entry for entry in segment.recorded_launches() if entry["flags"] & fmt.ENTRY_MIRRORED]
    for entry in mirrored:
        order = int(entry["order"])
        first = int(entry["headers_offset"])
        stop = int(entry["records_offset"]) + segment.records(entry).nbytes
        copy(first - int(segment.header["arena_offset"]), stop - first)
        if int(entry["order"]) != order:  # part of it may belong to the next launch
            segment.track_headers(entry)[:] = 0
    return len(mirrored)


def collect_or_let(segment: SegmentWriter, copy: Callable[[], None], keeper: Keeper | None) -> None:
    """Copies the mirror into the segment with copy(); if that raises RuntimeError, the keeper does it.

    copy() raises if a kernel has trapped before, or traps while copy() waits for it. Raises RuntimeError if neither
    can copy.
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
    """The rank's end of its keeper process."""

    def __init__(self, segment: SegmentWriter, device: str, descriptor: int, num_bytes: int) -> None:
        """device: the GPU's UUID. descriptor: file descriptor of the mirror.

        Raises RuntimeError with the reason if the keeper does not start.
        """
        self._link, theirs = socket.socketpair()
        arguments = (segment.name, device, str(num_bytes), str(theirs.fileno()), str(descriptor))
        try:
            command, environment = python_call(main, *arguments, env=_keeper_environment())
            # A separate session, because a signal that ends the rank's process group must not end the keeper. No pipe
            # of the rank, because its reader would wait for the keeper to end.
            self._process = subprocess.Popen(
                command,
                env=environment,
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
        """Has the keeper copy the mirror into the segment. Raises RuntimeError if the keeper is gone, too."""
        try:
            self._link.sendall(b"collect\n")
        except OSError as error:
            raise RuntimeError(f"the keeper is gone ({error.strerror})") from None
        self._hear("done", COLLECT_TIMEOUT_S)

    def release(self) -> None:
        """Ends the keeper: the memory it holds is no longer needed."""
        self._end(COLLECT_TIMEOUT_S)

    def _end(self, timeout_s: float) -> None:
        """Waits `timeout_s` for the keeper to end, then kills it."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # close() alone has no effect while forks hold the link
        self._link.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # inside a driver call a kill takes time
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
    """Returns this process's environment for the keeper.

    CUDA_VISIBLE_DEVICES is removed, because it may have been changed since CUDA started here.
    """
    environment = dict(os.environ)
    if "MIG-" not in environment.get("CUDA_VISIBLE_DEVICES", ""):  # a MIG slice is visible only by name
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def keep(segment: SegmentWriter, link: socket.socket, mirror: Any) -> None:
    """Runs in the keeper until the rank no longer needs it. mirror: a KeptMirror."""
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
    if int(segment.header["state"]) != fmt.SegmentState.CLOSED:
        segment.header["died_ns"] = time.monotonic_ns() + segment.anchor_ns
        if not int(segment.header["collected"]):
            collect()
            segment.header["collected"] = 1


def _read(link: socket.socket, rank: int, door: socket.socket, collect: Callable[[], None]) -> bytes:
    """Returns the rank's next message; b"" if it has finished its capture or died.

    Serves snapshot requests while waiting. Watches the process as well, because forks of a dead rank may hold the link
    open.
    """
    while True:
        readable, _, _ = select.select([link.fileno(), rank, door.fileno()], [], [])
        if link.fileno() in readable:
            return link.recv(_LINE_BYTES)
        if rank in readable:
            return b""
        with door.accept()[0] as caller, contextlib.suppress(OSError):  # the caller may be gone
            if is_own(caller):
                collect()
                caller.sendall(b"done\n")


def ask_keeper(segment_name: str) -> bool:
    """Asks a running rank's keeper, from any process, to copy what the device holds by now into the segment.

    Returns False if there is no keeper, or it does not answer.
    """
    with socket.socket(socket.AF_UNIX) as keeper, contextlib.suppress(OSError):
        keeper.settimeout(COLLECT_TIMEOUT_S)
        keeper.connect(_door_of(segment_name))
        return is_own(keeper) and keeper.recv(_LINE_BYTES) == b"done\n"
    return False


def _door_of(segment_name: str) -> bytes:
    """Returns the address of the socket where a keeper listens: an abstract one, which vanishes with its process.

    The name is hashed, because an address holds 107 bytes and a segment's name may be longer.
    """
    return b"\0tracekern-keeper-" + hashlib.sha256(segment_name.encode()).hexdigest().encode()


def main(name: str, device: str, num_bytes: str, link_fd: str, descriptor: str) -> int:
    """Runs the keeper's process. link_fd, descriptor: the inherited descriptors of the link and of the mirror."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the keeper must outlive the rank; it ends by itself
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
