"""Low latency dispatch and combine for decoding: each token goes straight to its experts' receive buffers."""

from __future__ import annotations

from tracekern.moe.calls.deepep import EventHandle, EventOverlap
from tracekern.moe.family import Family, Option
from tracekern.moe.low_latency.buffer import Buffer
from tracekern.moe.low_latency.handle import Handle
from tracekern.moe.low_latency.pipeline import (
    DISPATCH_DTYPES,
    LowLatencyPipeline,
    tensor_bytes,
    why_unsuitable,
)
from tracekern.moe.low_latency.reference import low_latency_reference

__all__ = ["FAMILY", "Buffer", "EventHandle", "EventOverlap", "Handle"]

FAMILY = Family(
    name="low_latency",
    variants={"low_latency": LowLatencyPipeline.stages},
    make_pipeline=LowLatencyPipeline,
    expected=lambda variant, batch, experts, shape, options: low_latency_reference(
        batch, experts, use_fp8=options.get("dispatch_dtype", 0) != 2
    ),
    reference_name=lambda variant: "low_latency_reference",
    why_unsuitable=why_unsuitable,
    tensor_bytes=tensor_bytes,
    expert_rows="regions",
    sent_events=frozenset({"send_message"}),
    received_events=frozenset({"copy_token"}),
    options=(
        Option(
            name="dispatch_dtype",
            help="Type of the values that low_latency sends in dispatch; fp8 has a scale for 128 values.",
            high=len(DISPATCH_DTYPES),
            variants=("low_latency",),
            describe=lambda number: f"{DISPATCH_DTYPES[number - 1]} messages",
            names=DISPATCH_DTYPES,
            default=1,
        ),
    ),
)
