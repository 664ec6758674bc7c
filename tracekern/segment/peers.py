"""Who is at the other end of a local socket: anybody on the machine can find it in /proc/net/unix and connect."""

from __future__ import annotations

import os
import socket
import struct


def is_own(link: socket.socket) -> bool:
    """Returns whether a connected local socket leads to a process of this process's effective user."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())
