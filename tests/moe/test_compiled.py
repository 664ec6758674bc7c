"""A family is an extension: what Python says of it unloaded is what C++ says, and its launches are those of a rank.

A clock, a time limit, an abort or a slow link belongs to a rank, whichever extension runs its kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from warm_ranks import run_moe

from tests.paths import ROOT
from tracekern import _core
from tracekern.compiled import _build, compiled
from tracekern.dump.reader import read_dump
from tracekern.errors import CommTimeout, NotBuilt
from tracekern.moe import shape
from tracekern.moe.families import FAMILIES
from tracekern.moe.low_latency import settings as low_latency
from tracekern.moe.two_hop import layout as two_hop_layout
from tracekern.moe.two_hop import settings as two_hop
from tracekern.moe.workload.options import MoeRun


@pytest.mark.parametrize("name", FAMILIES)
def test_variants_and_their_kernels(name):
    family, native = FAMILIES[name], compiled(name)
    assert list(family.variants) == list(native.variants)
    for variant, kernels in family.variants.items():
        in_order = iter(native.variants[variant])  # low latency has other kernels where a call comes in halves
        assert all(kernel in in_order for kernel in kernels)


def test_limits():
    facts = compiled("low_latency")
    assert (facts.scale_group, facts.num_slots) == (low_latency.SCALE_GROUP, low_latency.NUM_SLOTS)
    assert (facts.max_topk, facts.max_tokens) == (shape.MAX_TOPK, low_latency.MAX_TOKENS)
    facts = compiled("gemm")
    assert (facts.max_topk, facts.max_experts) == (shape.MAX_TOPK, shape.MAX_EXPERTS)
    facts = compiled("two_hop")
    assert (facts.max_nodes, facts.max_channels) == (two_hop_layout.MAX_NODES, two_hop.MAX_CHANNELS)


RUNS = [
    ("p2p", {"variant": "balanced"}),
    ("low_latency", {"variant": "low_latency"}),
    ("two_hop", {"variant": "two_hop"}),
    ("gemm", {"variant": "balanced", "expert": "int4_sparse"}),
]
SMALL = {"ranks": 2, "tokens": 8, "hidden": 128, "intermediate": 128, "experts": 8, "topk": 3}
AGES_NS = 1_000_000_000 * 1_000_000_000
"""So long ago clocks that drift by up to 4 us/s were together: by now they are far off, and apart."""


@pytest.mark.parametrize(("name", "about"), RUNS, ids=[name for name, _ in RUNS])
def test_kernels_of_each_extension_read_the_clock_of_their_rank(tmp_path, monkeypatch, name, about):
    seed, t0_ns = 5, _core.simulated_clock_now() - AGES_NS
    monkeypatch.setenv("TRACEKERN_SIMULATED_CLOCK", f"{seed}:{t0_ns}")
    before = _core.simulated_clock_now()
    run_moe(MoeRun(**SMALL, **about, iterations=1), tmp_path).raise_for_error()
    after = _core.simulated_clock_now()
    for rank in range(2):
        dump = read_dump(tmp_path / f"rank_{rank:05d}.tkdump")
        launch = next(launch for launch in dump.launches if launch.name in compiled(name).stages)
        ticks = dump.track_headers(launch)["start_ticks"].astype(np.int64)
        assert len(ticks)
        assert np.abs(ticks - before).min() > 10 * (after - before)
        host_ns = _core.simulated_clock_host_ns(seed, rank, t0_ns, ticks)
        assert ((before <= host_ns) & (host_ns <= after)).all()


@pytest.mark.parametrize(("name", "about"), RUNS[:3], ids=[name for name, _ in RUNS[:3]])
def test_kernels_of_each_extension_give_up_at_the_limit_of_their_rank(tmp_path, name, about):
    """The limit, the fault record and the abort word are those of the communicator, which the core has made."""
    late = {"late_rank": 1, "late_us": 1_000_000, "timeout_ms": 400}
    report = run_moe(MoeRun(**SMALL, **about, **late, iterations=1), tmp_path)
    assert report.ranks[0].exit_code == CommTimeout.exit_code
    assert "rank 1" in report.ranks[0].error
    fault = read_dump(tmp_path / "rank_00000.tkdump").metadata["fault"]
    assert (fault["kernel"] in compiled(name).stages, fault["peer"], fault["cause"]) == (True, 1, "timeout")


# The link of a rank through each extension: test_slow_link.py.


def test_a_family_and_a_core_of_other_headers_are_refused_in_one_line():
    code = "from tracekern import _core; _core.built_from = 'others'; import tracekern.compiled as c; c.compiled('p2p')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    told = "tracekern._p2p: built from other headers than tracekern._core; run `python -m pip install -e .` in "
    assert told in done.stderr.splitlines()[-1]


def test_a_checkout_that_cannot_be_written_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("tracekern.compiled._PACKAGE", tmp_path)
    monkeypatch.setattr(os, "access", lambda *asked: False)
    with pytest.raises(
        NotBuilt, match=rf"^tracekern\._p2p is not built, and {tmp_path} cannot be written; run a command"
    ):
        _build("p2p")


def test_a_checkout_without_what_builds_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("tracekern.compiled._PACKAGE", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pybind11" else name)
    with pytest.raises(NotBuilt, match=r"^tracekern\._p2p has to be built .* needs pybind11: python -m pip"):
        _build("p2p")


def test_help_and_what_users_import_load_no_family():
    code = (
        "import sys, tracekern.moe.families, tracekern.moe.gemm, tracekern.moe.calls.buffer; "
        "from tracekern.moe.workload.options import MoeRun; MoeRun(variant='balanced'); "
        "print(sorted(m for m in sys.modules if '._' in m and m.startswith('tracekern')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['tracekern._core']\n"
