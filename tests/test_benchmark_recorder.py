"""benchmarks/recorder.py: its ratios, and what it says of a peer that is not there."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from toolchains import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import recorder


def row(probe: str, warps: int, added_ns: float) -> recorder.Row:
    return {"probe": probe, "warps_per_sm": warps, "fmas": 125, "added_ns": added_ns}


def test_each_row_is_compared_with_the_others_of_its_own_configuration():
    rows = [row("nothing", 4, 0.0), row("wide", 4, 30.0), row("flashinfer", 4, 120.0), row("flashinfer", 16, 60.0)]
    proton = [row("proton", 4, 12.0), row("proton", 32, 12.0)]
    recorder.add_ratios(rows, proton)
    assert [entry["over_flashinfer"] for entry in rows + proton] == [None, 0.25, 1.0, 1.0, 0.1, None]
    assert {entry["over_clean"] for entry in rows + proton} == {None}


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_one_line_says_why_there_is_no_proton():
    assert recorder.measure_proton(1, 1) == ([], "ModuleNotFoundError: No module named 'triton'")
