"""Captures opened by real ranks of torch.distributed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.warm_ranks import run_ranks
from tracekern.dump.format import SampleKind
from tracekern.dump.reader import read_dump
from tracekern.timeline.load import load

RANK_PROGRAM = """
import os, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
import torch.distributed as dist
from tests.sessions import launch
from tracekern.comm.ranks import group
from tracekern.record import session
{before}
dist.init_process_group("gloo")
with session.capture({directory!r}{options}) as opened:
    rank = opened.group.rank
    for step in range({steps}):
        with opened.range(f"step {{step}}"):
            launch(opened, spans=4)
        {body}
dist.destroy_process_group()
"""


def rank_program(directory: Path, steps: int = 2, options: str = "", body: str = "pass", before: str = "") -> str:
    root = str(ROOT)
    return RANK_PROGRAM.format(
        path=[root], directory=str(directory), steps=steps, options=options, body=body, before=before
    )


def test_ranks_of_torch_distributed_make_one_capture(tmp_path: Path):
    codes, lines = run_ranks(3, rank_program(tmp_path))
    assert codes == [0, 0, 0], lines
    timeline = load(tmp_path)
    assert [rank.state for rank in timeline.ranks] == ["closed"] * 3
    assert timeline.aligned
    assert timeline.host_names == ("step 0", "step 1")
    assert json.loads((tmp_path / "capture.json").read_text())["num_ranks"] == 3
    for rank in range(3):
        samples = read_dump(tmp_path / f"rank_{rank:05d}.tkdump").clock_samples()
        assert set(samples["round_idx"].tolist()) == {0, 1}, "clocks are sampled when it opens and when it closes"
        assert SampleKind.PING_PONG not in samples["kind"].tolist(), "all read the clock of the host"
    assert {(rank.clock.hard_ns, rank.clock.anchor_ticks) for rank in timeline.ranks} == {
        (0.0, timeline.ranks[0].clock.anchor_ticks)
    }


def test_what_ranks_of_our_launcher_have_saved_takes_no_more_memory(tmp_path: Path):
    """Capture after capture in one run filled /dev/shm, until launches found no room."""
    program = rank_program(tmp_path)
    program += "print('left:', (session.Path('/dev/shm') / opened.segment.name).exists())"
    codes, lines = run_ranks(2, program)
    assert codes == [0, 0], lines
    assert [line for _, line in lines if "left:" in line] == ["left: False"] * 2
    assert len(load(tmp_path).ranks) == 2


OPENS_TWICE = """
import os, sys
import torch.distributed as dist
from tracekern.errors import BadInput
from tracekern.record.session import capture

def fail():
    raise ArithmeticError("no kernel")

dist.init_process_group("gloo")
try:
    with capture({directory!r}, **({fails} if dist.get_rank() == 1 else {{}})):
        print("opened")
except (ArithmeticError, BadInput) as error:
    print(f"told: {{type(error).__name__}}: {{error}}")
with capture({directory!r}):
    pass
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("fails", "own", "others"),
    [
        ('{"preload": [fail]}', "ArithmeticError: no kernel", "BadInput: rank 1: ArithmeticError: no kernel"),
        ('{"max_bytes": 1 << 47}', "BadInput: segment tracekern-", "BadInput: rank 1: segment tracekern-"),
        ('{"sink": "device"}', "BadInput: sink=", "BadInput: rank 1: sink="),
    ],
)
def test_where_one_rank_cannot_open_its_capture_all_say_why_and_can_open_another(
    tmp_path: Path, fails: str, own: str, others: str
):
    """The others lost a connection, said their peers."""
    codes, lines = run_ranks(3, OPENS_TWICE.format(directory=str(tmp_path), fails=fails))
    assert codes == [0, 0, 0], lines
    told = dict(line for line in lines if line[1].startswith("told: "))
    assert all(told[rank].startswith(f"told: {own if rank == 1 else others}") for rank in range(3)), lines
    assert len(load(tmp_path).ranks) == 3


def test_clocks_are_sampled_between_launches_by_agreement(tmp_path: Path):
    """Ranks pass their launches at different times; samples are due all the time, and nobody hangs or is left alone."""
    before = "from tracekern.record import clock_samples, sampling_schedule; clock_samples.SAMPLE_EVERY_S = 0.1"
    before += "; sampling_schedule._LEADER_PAUSES = 1"  # after a wait in vain the run would be over else
    program = rank_program(tmp_path, steps=100, before=before, body="time.sleep(0.003 * (1 + (rank + step) % 5))")
    codes, lines = run_ranks(3, program)
    assert codes == [0, 0, 0], lines
    assert not [line for _, line in lines if "no more clock samples" in line]
    rounds = [
        {int(sample["round_idx"]) for sample in read_dump(tmp_path / f"rank_{rank:05d}.tkdump").clock_samples()}
        for rank in range(3)
    ]
    assert rounds[0] == rounds[1] == rounds[2]
    assert len(rounds[0]) >= 3  # at both ends, and in between


def test_nodes_without_a_shared_disk_send_their_dumps_to_rank_0(tmp_path: Path):
    """Each rank is given a directory of its own, as on disks that are not shared; nothing said where its dump is."""
    program = rank_program(tmp_path / "shared")
    program = program.replace("with session.capture(", "with session.capture(os.environ['RANK'] + ").replace(
        repr(str(tmp_path / "shared")), repr("-capture")
    )
    program = f"import os; os.chdir({str(tmp_path)!r})\n" + program
    codes, lines = run_ranks(3, program)
    assert codes == [0, 0, 0], lines
    assert len(load(tmp_path / "0-capture").ranks) == 3
    told = ", ".join(f"{tmp_path / f'{rank}-capture'} (rank {rank})" for rank in range(3))
    assert [line for _, line in lines if "directories" in line] == [
        f"the ranks of this run gave different directories: {told}; all dumps go to that of rank 0, "
        f"{tmp_path / '0-capture'}"
    ]
