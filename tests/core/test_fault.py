"""What a fault record means: calls and tokens instead of the epochs and values of flags."""

from __future__ import annotations

import numpy as np
import pytest

from tracekern import _core
from tracekern.dump.fault import (
    FAULT_RECORD,
    FIRST_FAULT_RECORD,
    FLAG_VALUE_BITS,
    INTERRUPTED,
    describe_fault,
    parse_fault,
)
from tracekern.moe.low_latency.settings import FAULT_SLOTS, FAULT_VALUES
from tracekern.moe.p2p.pipeline import FAULT_VALUES as P2P_VALUES

FIRST = _core.first_epoch
NEVER = FIRST - 1
NAMES = {
    "rank_barrier": 9,
    "channels": ["none", "grid", "barrier"],
    "first_epoch": FIRST,
    "kernels": [
        {
            "first_stage": 0,
            "stages": ["dispatch_send"],
            "channels": ["counts"],
            "values": P2P_VALUES,
            "first_epoch": FIRST,
        },
        {
            "first_stage": 1,
            "stages": ["dispatch"],
            "channels": ["count"],
            "slots": FAULT_SLOTS,
            "values": FAULT_VALUES,
            "first_epoch": FIRST,
        },
        {"first_stage": 2, "stages": ["tell"], "channels": ["number"]},
        {
            "first_stage": 3,
            "stages": ["pass_on"],
            "channels": ["tail"],
            "roles": ["sender", "forwarder"],
            "rings": ["rdma", "nvl"],
            "peers": 2,
            "refusals": ["rank {rank} is tired", "rank {rank} met {number} others"],
        },
    ],
}


def told(
    wanted: int,
    seen: int,
    value: int = 0,
    stage: int = 0,
    channel: int = 3,
    layout: np.dtype[np.void] = FAULT_RECORD,
    **fields: int,
) -> str:
    record = np.zeros(1, layout)
    given = {"cause": 1, "peer": 1, "waited_ns": 5 * 10**8, "stage": stage, "channel": channel, **fields}
    for name, number in {**given, "wanted_epoch": wanted, "seen_epoch": seen, "seen_value": value}.items():
        record[name] = number % (1 << 32)
    return describe_fault(parse_fault(record.tobytes(), NAMES))


@pytest.mark.parametrize(
    ("said", "wanted", "seen", "value", "stage", "channel"),
    [
        ("channel counts slot 0: wanted call 1, nothing has come", FIRST, NEVER, 0, 0, 3),
        ("channel counts slot 0: wanted call 3, has 3 tokens of call 2", FIRST + 2, FIRST + 1, 3, 0, 3),
        ("channel counts slot 0: wanted call 18, has 1 token of call 17", FIRST + 17, FIRST + 16, 1, 0, 3),
        ("channel count local expert 0: wanted call 3, has 5 tokens of call 1", FIRST + 2, FIRST, ~5 % (1 << 24), 1, 3),
        ("channel number slot 0: wanted epoch 3, has value 101 of epoch 1", 3, 1, 101, 2, 3),
        ("channel number slot 0: wanted epoch 3, nothing has come", 3, 0, 0, 2, 3),
        ("channel barrier slot 0: wanted call 2, has that of call 1", FIRST + 1, FIRST, 0, 9, 2),
    ],
)
def test_a_flag_is_told_as_its_kernel_means_it(said: str, wanted: int, seen: int, value: int, stage: int, channel: int):
    assert f"; {said}; see what rank 1 was doing" in told(wanted, seen, value, stage, channel)


def test_blocks_that_did_not_come_are_counted():
    text = told(4, 1, channel=1, slot=3, peer=0, cause=2, aborted_by=2)
    assert text.endswith(
        "stopped waiting for blocks of its own after 500 ms: rank 1 gave up; 3 blocks of the kernel had not come"
    )


@pytest.mark.parametrize(("bits", "why"), [(0, "gave up"), (INTERRUPTED, "was interrupted (Ctrl-C)")])
def test_who_comes_after_another_one_gave_up_has_waited_for_nobody(bits: int, why: str):
    text = told(4, 1, channel=1, peer=0, cause=2, aborted_by=2 | bits, waited_ns=0)
    assert text.endswith(f"block 0 warp 0 stopped before it waited for anything: rank 1 {why} before")


def test_a_call_that_a_rank_refused_is_told_in_the_words_of_its_kernels():
    refused = {"stage": 3, "cause": 2, "aborted_by": 3, "version": 2}
    assert told(0, 0, **refused, refusal=2 << FLAG_VALUE_BITS | 5) == "rank 2 met 5 others"
    assert "rank 2 gave up" in told(0, 0, **refused, refusal=3 << FLAG_VALUE_BITS)  # of a later version


def test_records_from_before_they_had_a_version_are_read():
    assert FIRST_FAULT_RECORD.itemsize == 64
    fields = {"wanted": FIRST + 2, "seen": FIRST, "value": 3, "slot": 1}
    assert told(**fields, layout=FIRST_FAULT_RECORD) == told(**fields)
