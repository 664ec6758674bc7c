"""Hosts at a switch, on one machine: network namespaces with a name and a NIC each, which a bridge joins.

A NIC sends and receives at the given rate, with all others together. This needs root; missing() says what else this
machine lacks. Unlike those of fabric_hosts.py, these hosts are empty: a process becomes part of one, by join().
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable
from functools import cache
from types import TracebackType

import fabric_hosts

from tracekern.fabric import Net

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_NIC = "nic"


@cache
def missing() -> str:
    """Returns why such hosts cannot be made here, "" where they can."""
    why: str = fabric_hosts.missing()
    if why:
        return why
    tried = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "bridge"], capture_output=True, text=True)
    return f"a bridge cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """So many of them, as a context. rate: of each NIC and direction, as tc(8) has it; "" is as fast as it goes."""

    def __init__(self, num_hosts: int, rate: str = "") -> None:
        self._num_hosts, self._rate = num_hosts, rate
        self._holders: list[subprocess.Popen[bytes]] = []
        """Processes that keep the namespaces: the switch, then the hosts."""

    def __enter__(self) -> Hosts:
        try:
            self._hold("switch")
            self._run(0, "ip", "link", "add", "bridge", "type", "bridge")
            self._run(0, "ip", "link", "set", "bridge", "up")
            for host in range(self._num_hosts):
                self._hold(f"tracekern-{host}")
                self._plug_in(host)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def net(self, host: int) -> Net:
        return Net("tcp", f"10.78.0.{host + 1}")

    def enter(self, host: int) -> Callable[[], None]:
        """Returns what makes the process that calls it part of a host. It can be pickled."""
        return functools.partial(join, self._holders[1 + host].pid)

    def _hold(self, name: str) -> None:
        ready = f"hostname {name} && ip link set lo up && echo ready && exec sleep infinity"
        command = ["unshare", "--net", "--uts", "sh", "-c", ready]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{name}: its namespaces could not be made")

    def _plug_in(self, host: int) -> None:
        port, holder = f"port{host}", self._holders[1 + host].pid
        self._run(0, "ip", "link", "add", port, "type", "veth", "peer", "name", _NIC, "netns", str(holder))
        self._run(0, "ip", "link", "set", port, "master", "bridge", "up")
        self._run(1 + host, "ip", "address", "add", f"{self.net(host).source}/24", "dev", _NIC)
        self._run(1 + host, "ip", "link", "set", _NIC, "up")
        for place, link in ((1 + host, _NIC), (0, port)) if self._rate else ():
            limits = ("rate", self._rate, "burst", "256kb", "latency", "50ms")
            self._run(place, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limits)

    def _run(self, holder: int, *command: str) -> None:
        inside = ["nsenter", "--net", "--target", str(self._holders[holder].pid)]
        done = subprocess.run([*inside, *command], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def join(pid: int) -> None:
    """Makes the calling thread, and those that it starts, part of the network and the host name of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name, kind in (("net", _CLONE_NEWNET), ("uts", _CLONE_NEWUTS)):
        with open(f"/proc/{pid}/ns/{name}") as namespace:
            if libc.setns(namespace.fileno(), kind) != 0:
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
