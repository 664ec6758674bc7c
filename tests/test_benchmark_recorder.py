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


def test_goals_are_not_met_where_nothing_was_measured_to_judge_them(capsys):
    rows = [{**row("wide", 4, 30.0), "over_flashinfer": None, "over_clean": 0.5}]
    recorder.print_verdicts(rows)
    recorder.print_verdicts([{**rows[0], "over_flashinfer": 0.2}])
    recorder.print_verdicts([{**rows[0], "over_flashinfer": 0.4}])
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        "goals: not judged, they are ratios to FlashInfer's macros",
        "goals: 0 of 1 missed",
        "goals: 1 of 1 missed",
    ]


def test_without_its_header_one_line_says_why_there_is_no_flashinfer(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHINFER_INCLUDE", raising=False)
    assert recorder.flashinfer_include() == (None, "FLASHINFER_INCLUDE is not set")
    monkeypatch.setenv("FLASHINFER_INCLUDE", str(tmp_path))
    assert recorder.flashinfer_include() == (None, f"no flashinfer/profiler.cuh under {tmp_path}")
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "profiler.cuh").touch()
    assert recorder.flashinfer_include() == (tmp_path, "")


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_one_line_says_why_there_is_no_proton():
    assert recorder.measure_proton(1, 1) == ([], "ModuleNotFoundError: No module named 'triton'")
