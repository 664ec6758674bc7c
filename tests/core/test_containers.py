"""Ranks in containers: names of hosts tell nothing, and what two ranks share is found out for each thing by itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.paths import ROOT
from tracekern.comm.ranks.node import sees
from tracekern.files import mark_file
from tracekern.segment.names import SHM_DIR
from tracekern.timeline.load import load

RANK = """
import os, sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
from tests.flight_pairs import make_pair
from tracekern.comm.ranks.group import Group
from tracekern.record.session import capture
dist.init_process_group("gloo")
pipeline, call = make_pair(Group.discover(), timeout_s=30.0)
with capture(sys.argv[1], device=pipeline.comm.device, records_per_track=64) as session:
    assert call(0, session) and call(1, session)
    print("agrees on launches:", session._clocks._schedule is not None)
"""


def is_root_of_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "--uts", "true"], check=False).returncode == 0


def run_in_containers(program: str, directories: list[Path], setups: list[str]) -> list[str]:
    """What the ranks of a program print, each in a container of its own that a shell script has set up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(setups))}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            ["unshare", "--mount", "--uts", "sh", "-ec", f'{setup}\nexec "$@"', "sh", sys.executable, "-c"]
            + [program.format(root=str(ROOT)), str(directory)],
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (setup, directory) in enumerate(zip(setups, directories, strict=True))
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), said
    return ["".join(both) for both in said]


@pytest.mark.rotates
@pytest.mark.skipif(not is_root_of_namespaces(), reason="only root may make containers")
@pytest.mark.parametrize(
    ("setups", "sees_segments"),
    [
        (["mount -t tmpfs tmpfs /dev/shm", ":"], False),
        (["hostname one-container", "hostname other-container"], True),
    ],
    ids=["equal names and two /dev/shm", "two names and one /dev/shm"],
)
def test_ranks_in_containers_make_one_capture(tmp_path: Path, setups: list[str], sees_segments: bool):
    said = run_in_containers(RANK, [tmp_path] * 2, setups)
    assert [f"agrees on launches: {sees_segments}" in text for text in said] == [True, True], said
    timeline = load(tmp_path)
    assert [rank.state for rank in timeline.ranks] == ["closed"] * 2
    assert timeline.on_same_node(np.array([0]), np.array([1])).all(), "one machine"
    assert len({rank.clock.host_anchor_ns for rank in timeline.ranks}) == 1, "and one wall clock"
    assert not list(SHM_DIR.glob(".*.tmp"))


def make_link(path: Path) -> None:
    path.symlink_to("/dev/shm")


def make_what_others_can_write(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def make_anothers(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, 65534, 65534)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
@pytest.mark.parametrize("make", [make_link, make_what_others_can_write, make_anothers])
def test_what_another_user_may_have_made_is_no_sign_of_a_common_shm(make: Callable[[Path], None]):
    with mark_file(SHM_DIR) as name:
        assert sees(name)
        (SHM_DIR / name).unlink()
        assert not sees(name)
        make(SHM_DIR / name)
        assert not sees(name)
    assert not (SHM_DIR / name).exists()
    assert not sees("../../etc/passwd")
