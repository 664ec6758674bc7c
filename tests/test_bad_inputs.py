"""What a user mistypes: one line that says what is wrong and what to do, exit code 2, and nothing left behind."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tracekern.cli.main import main

TRACES = Path(__file__).parent.parent / "traces"

# (command line in a folder with GOOD, a capture; DAMAGED, one that was cut short; and NONE, an empty folder;
#  what is wrong, and what to do)
MISTAKES = [
    ("fly", "no such command 'fly'", "see tracekern --help"),
    ("--verbose", "no such option: --verbose", "see tracekern --help"),
    ("run fft", "no such workload", "wanted moe"),
    ("run moe", "no place for the capture", "give one with -o DIR"),
    ("run moe --variant fastest -o out", "--variant is 'fastest'", "wanted one of reference, sorted"),
    ("run moe --backend tpu -o out", "--backend is 'tpu'", "wanted one of auto, cpu, cuda"),
    ("run moe --dtype fp4 -o out", "--dtype is 'fp4'", "wanted one of fp32, fp16, bf16"),
    ("run moe --routing lucky -o out", "--routing is 'lucky'", "wanted one of uniform, zipf"),
    ("run moe --ranks two -o out", "invalid value for '--ranks'", "see tracekern run moe --help"),
    ("run moe --ranks 0 -o out", "--ranks is 0", "wanted 1 to 64"),
    ("run moe --tokens -3 -o out", "--tokens is -3", "wanted 1 to 262144"),
    ("run moe --iterations 0 -o out", "--iterations is 0", "wanted 1 to 1000000"),
    ("run moe --topk 9 --experts 8 -o out", "top-k 9 of 8 experts", "take at most 8"),
    ("run moe --experts 7 --ranks 2 -o out", "7 experts do not divide over 2 ranks", "take a multiple of 2, such as 8"),
    ("run moe --option speed -o out", "--option is 'speed'", "wanted NAME=NUMBER, such as partitions=4"),
    ("snapshot nobody -o out", "no capture is open on this machine", "programs that are inside"),
    ("salvage nobody -o out", "nothing of it is left on this machine", "lists what is"),
    ("overhead --backend gpu", "--backend is 'gpu'", "wanted one of auto, cpu, cuda"),
    ("info nowhere", "nowhere: no such file", "name a capture directory or a dump"),
    ("info NONE", "not a capture directory", "name the one given to capture()"),
    ("info DAMAGED", "its header says", "copy it again"),
    ("info GOOD --jsn", "no such option: --jsn", "see tracekern info --help"),
    ("report GOOD --window soon", "got 'soon'", "wanted START:END, for example 1.5ms:2ms"),
    ("report GOOD --window 2ms:1ms", "the window 2000000 ns to 1000000 ns is empty", "its end must be after its start"),
    ("report GOOD --ranks 9", "rank 9 is not in the timeline", "which has ranks 0-3"),
    ("report GOOD -o new/report.html", "its folder does not exist", "mkdir -p new"),
    ("merge GOOD GOOD -o out.pftrace", "rank 0 is also in", "name each rank once"),
    ("merge NONE -o out.pftrace", "not a capture directory", "name the one given to capture()"),
    ("export GOOD -o out.svg", "the suffix picks the format", "must be one of .pftrace"),
    ("export GOOD --tracks lane -o out.pftrace", "'lane' is not one of", "see tracekern export --help"),
    ("export GOOD --window 1s:2s -o out.pftrace", "nothing was recorded from 1.00 s to 2.00 s", "what there is lies"),
    ("export DAMAGED -o out.pftrace", "cut short or damaged", "copy it again"),
    ("open nowhere.pftrace", "no such file", "wanted a trace"),
    ("open GOOD/capture.json", "describes a capture", "name its directory"),
    ("diff GOOD", "missing argument 'B'", "see tracekern diff --help"),
    ("diff GOOD GOOD -o out.txt", "the suffix picks the format", "or .html for a page"),
    ("check GOOD", "nothing to check", "give --against BASELINE"),
    ("check GOOD --max wait_token.p99=fast", "limit is 'fast'", "wanted a time with its unit, as in 20us"),
    ("check GOOD --against nowhere", "nowhere: does not exist", "name a capture directory"),
    ("ab --base true", "missing option '--head'", "see tracekern ab --help"),
    ("ab --base true --head true", "base left no capture", "its command has to capture into {out}"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory of the commands, with the captures that MISTAKES name."""
    shutil.copytree(TRACES / "h200x4", tmp_path / "GOOD")
    shutil.copytree(TRACES / "h200x4", tmp_path / "DAMAGED")
    os.truncate(tmp_path / "DAMAGED" / "rank_00001.tkdump", 20_000)
    (tmp_path / "NONE").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "wrong", "remedy"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(folder, monkeypatch, capsys, line, wrong, remedy):
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["tracekern", *shlex.split(line)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2, said
    assert said.out == ""
    assert said.err.startswith("tracekern: "), said.err
    assert said.err.count("\n") == 1, said.err
    assert wrong in said.err
    assert remedy in said.err.partition(wrong)[2], said.err
    assert sorted(folder.rglob("*")) == before
