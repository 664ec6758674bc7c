"""Two hosts on one machine: processes that each have a network, a host name, mounts and a /dev/shm of their own.

Links between them are veth pairs, slowed down where a rate is given. Needs root; missing() says what is not here.
Imports no torch, and who uses this should not either: each host imports the module of its function.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from tracekern.errors import NotBuilt
from tracekern.fabric import Net
from tracekern.fabric.library import require_library

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
NAMES = ("tracekern-a", "tracekern-b")
LIMIT_S = 60.0

OnHost = Callable[[Connection, list[Net]], Any]
"""Runs on a host: gets a pipe to the other one, and an interface for each link. What it returns must be picklable."""


@cache
def missing() -> str:
    """Returns why hosts with engines cannot be made here, "" where they can."""
    try:
        require_library()
    except NotBuilt as error:
        return str(error)
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"two hosts need {program}(8), which is not here"
    trial = (
        "mount --make-rprivate / && mount -t tmpfs none /dev/shm && ip link add link0 type veth peer name link1"
        " && tc qdisc add dev link0 root tbf rate 1gbit burst 1mb latency 50ms"
    )
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", trial], capture_output=True, text=True)
    said = (tried.stderr.strip() or f"exit code {tried.returncode}").splitlines()[-1]
    return "" if tried.returncode == 0 else f"namespaces cannot be made here: {said}"


def run_on_hosts(first: OnHost, second: OnHost, num_links: int = 1, rate: str = "") -> tuple[Any, Any]:
    """Returns what both return. Raises RuntimeError if one fails. rate: of each link and direction, as tc(8) has it."""
    context = multiprocessing.get_context("spawn")
    between = context.Pipe()
    pipes, processes = [], []
    for host, function in enumerate((first, second)):
        here, there = context.Pipe()
        process = context.Process(target=_be_host, args=(host, function, there, between[host], num_links, rate))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    for end in between:
        end.close()
    try:
        for pipe in pipes:
            _receive(pipe)  # it has its namespaces
        for link in range(num_links):
            _join([process.pid or 0 for process in processes], link)
        for pipe in pipes:
            pipe.send("joined")
        return _receive(pipes[0]), _receive(pipes[1])
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(5)
            process.kill()


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        raise RuntimeError(f"a host has said nothing for {LIMIT_S:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a host has ended without a result; why stands in its output") from None


def _join(pids: list[int], link: int) -> None:
    """Lays a cable from host to host, which is called the same on both."""
    ends = [f"tk{os.getpid()}{side}{link}"[-15:] for side in "ab"]
    _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for end, pid in zip(ends, pids, strict=True):
        _run("ip", "link", "set", end, "netns", str(pid), "name", link_name(link))


def link_name(link: int) -> str:
    return f"link{link}"


def set_link(link: int, state: str) -> None:
    """Sets this host's end of a link "up" or "down"."""
    _run("ip", "link", "set", link_name(link), state)


def bytes_sent(link: int) -> int:
    """Of this host, over a link."""
    (found,) = json.loads(_run("ip", "-json", "-statistics", "link", "show", link_name(link)))
    return int(found["stats64"]["tx"]["bytes"])


def _be_host(host: int, function: OnHost, pipe: Connection, other: Connection, num_links: int, rate: str) -> None:
    _enter_namespaces(NAMES[host])
    pipe.send(None)
    pipe.recv()
    pipe.send(function(other, [_connect(host, link, rate) for link in range(num_links)]))


def _enter_namespaces(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def require(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    require(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET), "unshare")
    require(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    require(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None), "mount /dev/shm")
    socket.sethostname(name)
    _run("ip", "link", "set", "lo", "up")


def _connect(host: int, link: int, rate: str) -> Net:
    address, name = f"10.77.{link}.{host + 1}", link_name(link)
    _run("ip", "address", "add", f"{address}/24", "dev", name)
    _run("ip", "link", "set", name, "up")
    if rate:
        _run("tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    return Net("tcp", address)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
