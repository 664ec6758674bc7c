"""The fault record: what the first wait that timed out waited for. Mirrors csrc/comm/fault.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracekern.formatting import count, duration

_FIRST_HALF = [
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
_SECOND_HALF = [
    ("version", "<u4"),
    ("wanted_value", "<u4"),
    ("role", "<u4"),
    ("ring", "<u4"),
    ("head", "<u4"),
    ("tail", "<u4"),
    ("refusal", "<u4"),
    ("unused", "V36"),
]
FAULT_RECORD = np.dtype(_FIRST_HALF + _SECOND_HALF)
"""Layout of a fault record. waited_ns holds clock ticks, which are ns on both backends."""
FIRST_FAULT_RECORD = np.dtype(_FIRST_HALF)
"""Its layout before it had a version."""

INTERRUPTED = 1 << 31
"""Beside the rank in aborted_by: it was interrupted, such as by Ctrl-C."""
FLAG_VALUE_BITS = 24
_CAUSES = ("", "timeout", "peer_aborted")
_ON_TIMEOUT = ("raise", "trap")
_COUNTS = ("rank", "peer", "block", "warp", "slot", "wanted_epoch", "seen_epoch", "seen_value", "waited_ns")
_RANKS = ("rank", "peer", "aborted_by")
_RING_COUNTS = ("wanted_value", "head", "tail")
_GRID = "grid"
"""The communicator's channel for the blocks of a kernel: its slot says how many have not come."""


def parse_fault(raw: bytes, names: dict[str, Any]) -> dict[str, Any] | None:
    """Parses a record, of this version or the first, and names its numbers. Returns None if there is no fault.

    Of a wait for a position in a ring there are also wanted_value, role and ring (numbers from 0; role_name and
    ring_name where these are known), head and tail.

    names: "rank_barrier" is the stage of the communicator's own kernel, "channels" are its channels and "first_epoch"
    is the epoch of its first barrier. "world_ranks" are the run's ranks of a group's, which may be called
    "communicator". "kernels" has one entry for each
    user of the communicator: "first_stage"; "stages", the user's kernels; "channels", which are numbered after the
    communicator's; and it may have "slots", "values", "first_epoch", "roles", "rings", "peers" and "refusals"
    (Communicator.add_kernels()).
    """
    record = np.frombuffer(raw.ljust(FAULT_RECORD.itemsize, b"\0"), FAULT_RECORD)[0]
    cause = int(record["cause"])
    if not 0 < cause < len(_CAUSES):
        return None
    stage, user = int(record["stage"]), {}
    for entry in names.get("kernels", ()):
        if entry["first_stage"] <= stage < entry["first_stage"] + len(entry["stages"]):
            user = entry
    if stage == names.get("rank_barrier"):
        kernel, user = "rank_barrier", {"first_epoch": names.get("first_epoch")}
    else:
        kernel = str(user["stages"][stage - user["first_stage"]]) if user else f"kernel {stage}"
    channels = [*names.get("channels", ()), *user.get("channels", ())]
    channel = _name_of(channels, int(record["channel"]))
    slot_name = user.get("slots", {}).get(channel)
    aborted_by = int(record["aborted_by"])
    world = names.get("world_ranks", ())
    fault = {
        "cause": _CAUSES[cause],
        "kernel": kernel,
        "channel": channel,
        **({"slot_name": slot_name} if slot_name else {}),
        **{key: int(record[key]) for key in _COUNTS},
        **_decode_flags(record, channel, user),
        **_decode_ring(record, user),
        **({"node": int(record["peer"]) // user["peers"]} if user.get("peers") else {}),
        **_decode_refusal(record, names),
        **({"communicator": names["communicator"]} if names.get("communicator") else {}),
        "aborted_by": (aborted_by & ~INTERRUPTED) - 1,
        "was_interrupted": bool(aborted_by & INTERRUPTED),
        "on_timeout": _name_of(_ON_TIMEOUT, int(record["on_timeout"])),
    }
    return fault | {key: world[fault[key]] for key in _RANKS if 0 <= fault[key] < len(world)}


def _decode_flags(record: Any, channel: str, user: dict[str, Any]) -> dict[str, Any]:
    """What the flag that was wanted and the one that was there mean to the kernel's user.

    wanted_call, seen_call: calls count from 1, and 0 is a flag that nobody has raised yet. value, value_name: what
    the flag said of the call that was seen, such as 3 of "token".
    """
    if channel == _GRID:
        return {}
    first_epoch, decoded = user.get("first_epoch"), dict[str, Any]()
    if first_epoch is not None:
        for key in ("wanted", "seen"):
            decoded[f"{key}_call"] = (int(record[f"{key}_epoch"]) - first_epoch + 1) % (1 << 32)
    if name := user.get("values", {}).get(channel):
        value = int(record["seen_value"])
        decoded["value_name"] = name.removeprefix("~")
        decoded["value"] = ~value % (1 << FLAG_VALUE_BITS) if name.startswith("~") else value
    return decoded


def _decode_ring(record: Any, user: dict[str, Any]) -> dict[str, Any]:
    if not record["version"] or not record["ring"]:
        return {}
    counted_from_1 = {key: int(record[key]) - 1 for key in ("role", "ring")}
    names = {
        f"{key}_name": str(user[f"{key}s"][number])
        for key, number in counted_from_1.items()
        if number < len(user.get(f"{key}s", ()))
    }
    return {**counted_from_1, **names, **{key: int(record[key]) for key in _RING_COUNTS}}


def _decode_refusal(record: Any, names: dict[str, Any]) -> dict[str, str]:
    """Why another rank refused, too, whose kernel may be of another user than the one that gave up here."""
    reason, number = divmod(int(record["refusal"]), 1 << FLAG_VALUE_BITS)
    texts = next((entry["refusals"] for entry in names.get("kernels", ()) if "refusals" in entry), ())
    if not 0 < reason <= len(texts):
        return {}
    text, world = str(texts[reason - 1]).replace("{number}", str(number)), names.get("world_ranks", ())
    for place, rank in (("{rank}", int(record["aborted_by"]) - 1), ("{peer}", number)):
        text = text.replace(place, str(world[rank] if 0 <= rank < len(world) else rank))
    return {"refusal": text}


def describe_fault(fault: dict[str, Any]) -> str:
    """Returns one line: who waited for whom, in which kernel, for what, and what was there instead. Or why a rank
    refused the call.
    """
    of_group = f" of {fault['communicator']}" if "communicator" in fault else ""
    who = f"rank {fault['rank']} {fault['kernel']}{of_group} block {fault['block']} warp {fault['warp']}"
    peer = f"rank {fault['peer']}" + (f" of node {fault['node']}" if "node" in fault else "")
    waited, what = f"after {duration(fault['waited_ns'])}", describe_wanted(fault)
    trapped = "; the kernel trapped: this process can no longer use its device" if fault["on_timeout"] == "trap" else ""
    if "refusal" in fault:
        return f"{fault['refusal']}{trapped}"
    if fault["cause"] != "peer_aborted":
        return f"{who} gave up on {peer} {waited}; {what}; see what rank {fault['peer']} was doing{trapped}"
    why = "was interrupted (Ctrl-C)" if fault.get("was_interrupted") else "gave up"
    if has_not_waited(fault):
        return f"{who} stopped before it waited for anything: rank {fault['aborted_by']} {why} before{trapped}"
    whom = "blocks of its own" if fault["channel"] == _GRID else peer
    return f"{who} stopped waiting for {whom} {waited}: rank {fault['aborted_by']} {why}; {what}{trapped}"


def has_not_waited(fault: dict[str, Any]) -> bool:
    """Returns whether another rank had given up before this one came to wait. Kernels drop the lowest bit of a time."""
    return bool(fault["cause"] == "peer_aborted" and fault["waited_ns"] <= 1)


def describe_wanted(fault: dict[str, Any]) -> str:
    """Returns what was waited for and what was there: "channel counts slot 0: wanted call 3, nothing has come"."""
    if fault["channel"] == _GRID:
        return f"{count(fault['slot'], 'block')} of the kernel had not come"
    place = f"channel {fault['channel']} {fault.get('slot_name', 'slot')} {fault['slot']}"
    unit = "call" if "wanted_call" in fault else "epoch"
    seen, value = fault[f"seen_{unit}"], fault["seen_value"]
    if "value_name" in fault:
        what = count(fault["value"], fault["value_name"])
    elif "ring" in fault:
        what = str(value)
    else:
        what = "that" if unit == "call" or not value else f"value {value}"
    has = f"has {what} of {unit} {seen}" if seen or (unit == "epoch" and value) else "nothing has come"
    if "ring" not in fault:
        return f"{place}: wanted {unit} {fault[f'wanted_{unit}']}, {has}"
    whose = fault.get("role_name", f"role {fault['role']}")
    ring = f"ring {fault.get('ring_name', fault['ring'])} of {whose} is at head {fault['head']}, tail {fault['tail']}"
    position = f"{fault['wanted_value']} of " if fault["wanted_value"] else ""
    return f"{place}: wanted {position}{unit} {fault[f'wanted_{unit}']}, {has}; {ring}"


def _name_of(names: Sequence[Any], number: int) -> str:
    return str(names[number]) if number < len(names) else str(number)
