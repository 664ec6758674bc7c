"""benchmarks/overhead_pipeline.py: what it makes of the times that ranks measured."""

from __future__ import annotations

import sys

import pytest
from toolchains import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import overhead_pipeline


def measured(off_us: list[float], on_us: list[float], mode: str = "device", unrecorded: int = 0) -> dict[str, object]:
    """One rank's row."""
    counted = {"off_queue_us": 1.0, "on_queue_us": 2.0, "records_per_call": 10, "launches_in_device_memory": 1.0}
    return {"tokens": 64, "mode": mode, "off_us": off_us, "on_us": on_us, "unrecorded": unrecorded, **counted}


def test_each_call_takes_as_long_as_its_slowest_rank():
    row = overhead_pipeline.summarise((measured([10, 20, 30], [11, 40, 31]), measured([12, 16, 20], [18, 21, 36])))
    assert (row["off_us"], row["on_us"]) == (20, 36)
    assert row["on_over_off"] == pytest.approx(36 / 20)
    assert row["pair_ratio"] == pytest.approx(sorted([18 / 12, 40 / 20, 36 / 30])[1])
    assert row["records_per_s"] == pytest.approx(10 / 36e-6)


@pytest.mark.parametrize(
    ("mode", "on_us", "unrecorded", "wanted"),
    [
        ("device", 104, 0, []),
        ("host", 150, 0, []),
        ("device", 145, 0, ["64 tokens, device: traced calls take 1.45x; compare the machine code of the two bodies"]),
        ("flight recorder", 101, 3, ["3 traced launches found no room and ran unrecorded: not a measurement"]),
    ],
)
def test_complains_of_what_is_no_measurement_or_broken(mode, on_us, unrecorded, wanted):
    row = overhead_pipeline.summarise((measured([100.0] * 3, [float(on_us)] * 3, mode, unrecorded),))
    assert overhead_pipeline.complaints([row]) == wanted
