"""The planted faults of test_mutants.py on real GPUs: some run has to notice each; skipped where there are none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from gpu_mutants import SITES
from test_mutants import MUTANTS
from toolchains import ROOT

FLAGS = "-DTK_PLANTED_FAULTS -DTK_RANDOM_DELAYS"
ALL = [f"{channel}:{mutation}" for sites in SITES.values() for channel, mutation in sites]


def test_every_site_of_the_cpu_is_attacked_here_too():
    assert set(ALL) == {site for _, site in MUTANTS if not site.endswith((":release", ":acquire"))}


@pytest.fixture(scope="module")
def noticed(tmp_path_factory):
    """{site: how it was noticed} from a copy of the tree, built with the faults in it."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} are here")
    copy = tmp_path_factory.mktemp("planted") / "tree"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "traces", "_cuda*.so"))
    environment = {**os.environ, "TRACEKERN_NVCC_FLAGS": FLAGS, "PYTHONPATH": str(copy)}
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(build, cwd=copy, env=environment, check=True, capture_output=True)
    attack = [sys.executable, "tests/gpu_mutants.py", str(min(torch.cuda.device_count(), 4))]
    done = subprocess.run(attack, cwd=copy, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.multigpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("site", ALL)
def test_planted_fault_is_noticed(noticed, site):
    assert noticed[site], f"{site} left out, and nothing noticed"


@pytest.mark.multigpu
@pytest.mark.parametrize("variant", list(SITES))
def test_without_a_fault_the_same_run_is_right(noticed, variant):
    assert not noticed[f"{variant}:control"]
