"""One more of a kind is new files only: a toy of each (tests/toys), in a copy of the tree, is found everywhere."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from captures import CaptureSpec, write_capture
from toolchains import ROOT, compile_sm_90

import tracekern
from tracekern import _core
from tracekern.analysis.findings import Findings
from tracekern.viewers.report.report_page import questions

TOYS = ROOT / "tests" / "toys"
CPU_CAPTURE = ROOT / "traces" / "cpu_8_ranks"


class Tree:
    """A copy of the tree with the files of a toy, none of which it had, and the compiled part of this one."""

    def __init__(self, toy: str, root: Path) -> None:
        self.root = root
        left_out = shutil.ignore_patterns("*.so", "__pycache__", "include")
        shutil.copytree(ROOT / "tracekern", root / "tracekern", ignore=left_out)  # follows the link to viewers
        for path in Path(_core.__file__).parent.glob("_*.so"):
            (root / "tracekern" / path.name).symlink_to(path)
        shutil.copytree(ROOT / "csrc", root / "csrc")
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, root)
        added = [path.relative_to(TOYS / toy) for path in (TOYS / toy).rglob("*.*") if path.is_file()]
        assert added
        assert [path for path in added if (root / path).exists()] == []
        shutil.copytree(TOYS / toy, root, dirs_exist_ok=True)

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Python with the tree's package; the words follow `python`."""
        environment = {**os.environ, "PYTHONPATH": str(self.root), "COLUMNS": "200", "TRACEKERN_CUDA": "0"}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True)

    def tracekern(self, *words: object) -> str:
        """What the command prints."""
        done = self.run("-m", "tracekern", *words)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


def test_a_kernel_family_is_two_new_folders_and_built_when_it_is_needed(tmp_path: Path):
    tree = Tree("family", tmp_path / "tree")
    assert "toy" in tree.tracekern("run", "moe", "--help").split("--variant")[1].split("--")[0]
    assert not list(tree.root.glob("tracekern/_toy.*"))
    # One of two that need it compiles; the other one waits, and imports what it finds.
    load = ("-c", "from tracekern.compiled import compiled; print(list(compiled('toy').variants))")
    with ThreadPoolExecutor() as two:
        done = list(two.map(lambda _: tree.run(*load), range(2)))
    assert [one.stdout for one in done] == ["['toy']\n"] * 2, done[0].stderr[-3000:] + done[1].stderr[-3000:]
    assert sum(one.stderr.count("[1/1] g++ csrc/moe/toy/bindings.cpp") for one in done) == 1
    shape = ("--ranks", 3, "--tokens", 9, "--hidden", 97, "--experts", 6, "--topk", 2, "--iterations", 2)
    told = tree.tracekern("run", "moe", "--variant", "toy", *shape, "-o", tmp_path / "capture", "--json")
    assert json.loads(told)["runs"][0]["options"]["variant"] == "toy"
    timeline = tracekern.load(tmp_path / "capture")
    assert {"signal_here", "wait_here", "copy_token"} <= {event.name for event in timeline.events}
    assert {launch.name for launch in timeline.launches} == {"rank_barrier", "echo"}
    assert len(timeline.flows) >= 3 * 3 * 2  # each rank tells each, in two calls


@pytest.mark.compilers
def test_its_kernels_are_compiled_for_gpus_as_all_others(tmp_path: Path):
    tree = Tree("family", tmp_path / "tree").root
    compile_sm_90(tree / "csrc" / "moe" / "toy" / "kernels.cu", include=tree / "csrc")


def test_an_export_format_is_one_new_file(tmp_path: Path):
    tree = Tree("format", tmp_path / "tree")
    capture = write_capture(tmp_path / "capture", CaptureSpec(num_ranks=2))
    num_spans = len(tracekern.load(capture).spans)
    for name in ("a.toy", "a.toy.json"):  # the longest suffix counts
        told = tree.tracekern("export", capture, "-o", tmp_path / name, "--tracks", "block", "--json")
        assert json.loads(told)["format"] == "toy"
        assert (tmp_path / name).read_text() == f"{num_spans} spans by block"
    for command in ("export", "merge"):
        refused = tree.run("-m", "tracekern", command, capture, "-o", "a.csv").stderr
        assert ".json.gz, .parquet, .toy, .toy.gz, .toy.json\n" in refused
        shown = tree.tracekern(command, "--help")
        assert ".pftrace, .json, .toy (also .gz), .parquet, .toy.json." in shown
    assert ".pftrace, .json, .toy (also .gz), .toy.json." in tree.tracekern("diff", "--help")


def test_a_question_is_two_new_files(tmp_path: Path):
    tree = Tree("question", tmp_path / "tree")
    tree.tracekern("report", CPU_CAPTURE, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    findings = Findings(tracekern.load(CPU_CAPTURE))
    keys = [question.key for question in questions() if question.draw(findings)]
    assert re.findall('<section id="([^"]+)"', page) == [*keys[:-1], "patience", "trust"]
    assert '<a href="#patience">Patience</a>' in page
    part = page.split('id="patience"')[1].split("</section>")[0]
    assert "<h2>Who waits without a word?</h2>" in part
    waits = findings.waits.wait_ns
    cells = [html.unescape(cell) for cell in re.findall("<td[^>]*>([^<]*)</td>", part)]
    assert cells == [str(number) for number in (len(waits), waits.max(), len(findings.answer.costs))]
