"""The turns of `tracekern ab` as a function; test_check_command.py has the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import record

from tracekern.errors import BadInput
from tracekern.gate.ab import Turn, run_turns, turns
from tracekern.gate.compare import Rules


def test_a_warm_up_counts_for_nothing_whatever_it_lost(tmp_path):
    sound, lossy = record(tmp_path / "sound"), record(tmp_path / "lossy", room=50)
    command = f"case {{out}} in *_warm_up_??) cp {lossy}/* {{out}};; *) cp {sound}/* {{out}};; esac"
    todo = turns(2, tmp_path / "ab", warm_ups=1)
    names = [f"{side}_{number}" for number in ("warm_up_00", "00") for side in ("base", "head")] + [
        "head_01",
        "base_01",
    ]
    assert [turn.directory.name for turn in todo] == names
    sides = run_turns(todo, dict.fromkeys(("base", "head"), command), Rules())
    assert sides.problems == ()
    assert [[Path(run.source).name for run in side] for side in (sides.base, sides.head)] == [
        ["base_00", "base_01"],
        ["head_00", "head_01"],
    ]


def test_a_command_that_takes_too_long_may_clean_up(tmp_path):
    cleaned = tmp_path / "cleaned"
    command = f"trap 'touch {cleaned}; exit' TERM; sleep 100 & wait"
    with pytest.raises(BadInput, match=r"took longer than 0\.5 s"):
        run_turns([Turn("base", tmp_path / "base")], {"base": command}, Rules(), timeout_s=0.5)
    assert cleaned.exists()
