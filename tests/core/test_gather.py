"""How the dumps of several ranks come together where a disk is full."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from test_session_ranks import rank_program

from tests.warm_ranks import run_ranks
from tracekern.comm.ranks.group import Group
from tracekern.dump.reader import read_dump
from tracekern.errors import PeerLost
from tracekern.timeline.load import load

FULL_DISK = """
    if rank == {rank}:
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
"""


def run_two(program: str) -> tuple[list[int], list[str]]:
    """Exit codes, and lines that begin with the rank that wrote them."""
    codes, lines = run_ranks(2, program)
    return codes, [f"{rank} {line}" for rank, line in lines]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_its_dump_tells_the_others(tmp_path: Path, rank: int):
    """They waited for it in vain, for a minute."""
    codes, lines = run_two(rank_program(tmp_path, body=FULL_DISK.format(rank=rank)))
    assert [code != 0 for code in codes] == [rank == 0, rank == 1], "\n".join(lines)
    assert not [line for line in lines if "not all ranks closed" in line]
    assert not [line for line in lines if "could not write its dump" in line], "it says so by itself"
    *_, last = [line for line in lines if line.startswith(f"{rank} ") and "BadInput: " in line]
    assert last.endswith("-o DIR` saves it")
    assert [one.rank for one in load(tmp_path).ranks] == [0, 1], "the launcher has room, and saves it"


def test_a_dump_that_rank_0_has_no_room_for_stays_on_its_node(tmp_path: Path):
    """Each rank is given a directory of its own, as on disks that are not shared."""
    program = rank_program(tmp_path / "capture", body=FULL_DISK.format(rank=0))
    place = repr(str(tmp_path / "capture"))
    program = program.replace(f"capture({place}", f"capture({place} + os.environ['RANK']")
    codes, lines = run_two(program)
    assert [code != 0 for code in codes] == [True, False], "\n".join(lines)
    assert [line for line in lines if line.startswith("1 rank 0 could not write it; this rank's dump is ")]
    assert read_dump(tmp_path / "capture1" / "rank_00001.tkdump").rank == 1
    assert [one.rank for one in load([tmp_path / "capture0", tmp_path / "capture1"]).ranks] == [0, 1], "as merge does"


def come_alone(_: Group) -> None:
    """Rank 1 comes to a barrier; rank 0 goes on when it has given up."""
    from torch.distributed.distributed_c10d import _get_default_store

    store, group = _get_default_store(), Group.discover()
    if group.rank == 1:
        with pytest.raises(PeerLost, match="rank 1: the other ranks do not answer"):
            group.barrier(0.5)
        store.set("rank 1 gave up", "")
    store.wait(["rank 1 gave up"], timedelta(seconds=20))


def test_the_limit_of_a_barrier_holds_on_every_rank(pools):
    """A rank that failed waited a minute for rank 0 before its launcher could see it."""
    pools(2).call(come_alone)
