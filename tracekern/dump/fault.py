"""The fault record: what the first wait that timed out waited for. Mirrors csrc/comm/fault.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracekern.formatting import duration

FAULT_RECORD = np.dtype(
    [
        ("claimed", "<u4"),
        ("cause", "<u4"),
        ("stage", "<u4"),
        ("channel", "<u4"),
        ("rank", "<u4"),
        ("peer", "<u4"),
        ("block", "<u4"),
        ("warp", "<u4"),
        ("slot", "<u4"),
        ("wanted_epoch", "<u4"),
        ("seen_epoch", "<u4"),
        ("seen_value", "<u4"),
        ("waited_ns", "<u8"),
        ("aborted_by", "<u4"),
        ("on_timeout", "<u4"),
    ]
)
"""Layout of a fault record. waited_ns holds clock ticks, which are ns on both backends."""

_CAUSES = ("", "timeout", "peer_aborted")
_ON_TIMEOUT = ("raise", "trap")
_COUNTS = ("rank", "peer", "block", "warp", "slot", "wanted_epoch", "seen_epoch", "seen_value", "waited_ns")


def parse_fault(raw: bytes, names: dict[str, Any]) -> dict[str, Any] | None:
    """Parses the record in 64 bytes and names its numbers. Returns None if there is no fault.

    names: "rank_barrier" is the stage of the communicator's own kernel, "channels" are its channels. "kernels" has one
    entry for each user of the communicator: "first_stage"; "stages", the user's kernels; "channels", which are numbered
    after the communicator's; and it may have "slots", what a channel's slot is.
    """
    record = np.frombuffer(raw, FAULT_RECORD)[0]
    cause = int(record["cause"])
    if not 0 < cause < len(_CAUSES):
        return None
    stage, user = int(record["stage"]), {}
    for entry in names.get("kernels", ()):
        if entry["first_stage"] <= stage < entry["first_stage"] + len(entry["stages"]):
            user = entry
    if stage == names.get("rank_barrier"):
        kernel = "rank_barrier"
    else:
        kernel = str(user["stages"][stage - user["first_stage"]]) if user else f"kernel {stage}"
    channels = [*names.get("channels", ()), *user.get("channels", ())]
    channel = _name_of(channels, int(record["channel"]))
    slot_name = user.get("slots", {}).get(channel)
    return {
        "cause": _CAUSES[cause],
        "kernel": kernel,
        "channel": channel,
        **({"slot_name": slot_name} if slot_name else {}),
        **{key: int(record[key]) for key in _COUNTS},
        "aborted_by": int(record["aborted_by"]) - 1,
        "on_timeout": _name_of(_ON_TIMEOUT, int(record["on_timeout"])),
    }


def describe_fault(fault: dict[str, Any]) -> str:
    """Returns one line: who waited for whom, in which kernel, for what, and what was there instead."""
    who = f"rank {fault['rank']} {fault['kernel']} block {fault['block']} warp {fault['warp']}"
    slot = f"{fault.get('slot_name', 'slot')} {fault['slot']}"
    what = (
        f"channel {fault['channel']} {slot}: wanted epoch {fault['wanted_epoch']}, "
        f"saw epoch {fault['seen_epoch']} value {fault['seen_value']}"
    )
    waited = f"after {duration(fault['waited_ns'])}"
    trapped = "; the kernel trapped: this process can no longer use its device" if fault["on_timeout"] == "trap" else ""
    if fault["cause"] == "peer_aborted":
        who = f"{who} stopped waiting for rank {fault['peer']} {waited}: rank {fault['aborted_by']} gave up"
        return f"{who}; {what}{trapped}"
    return f"{who} gave up on rank {fault['peer']} {waited}; {what}; see what rank {fault['peer']} was doing{trapped}"


def _name_of(names: Sequence[Any], number: int) -> str:
    return str(names[number]) if number < len(names) else str(number)
