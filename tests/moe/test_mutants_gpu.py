"""The planted faults of test_mutants.py on real GPUs: some run has to notice each; skipped where there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import planted_tree
import pytest
import torch
from gpu_mutants import SITES
from test_mutants import MUTANTS

from tests.devices import require_gpus

ALL = [f"{variant}:{channel}:{mutation}" for variant, sites in SITES.items() for channel, mutation in sites]


def test_every_site_of_the_cpu_is_attacked_here_too():
    attacked = {site.split(":", 1)[1] for site in ALL}
    assert attacked == {site for _, site in MUTANTS if not site.endswith((":release", ":acquire"))}


@pytest.fixture(scope="module")
def noticed(tmp_path_factory):
    """{site: how it was noticed} from a copy of the tree, built with the faults in it.

    TRACEKERN_PLANTED_TREE names one that planted_tree.py has made already.
    """
    require_gpus(2)
    named = os.environ.get("TRACEKERN_PLANTED_TREE")
    copy = Path(named) if named else planted_tree.build(tmp_path_factory.mktemp("planted") / "tree")
    environment = {**os.environ, "PYTHONPATH": str(copy)}
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
