"""The smallest family: ranks wait for each other, and each gets back what it gave."""

from __future__ import annotations

from functools import partial

from tracekern.moe.calls.pipeline import Pipeline
from tracekern.moe.family import Family

FAMILY = Family(
    name="toy",
    variants={"toy": ("echo",)},
    make_pipeline=partial(Pipeline, "toy"),
    expected=lambda variant, batch, experts, shape, options: batch.x,
    reference_name=lambda variant: "x",
)
