"""What a rank waited for when it gave up, as its dump tells: who analyses it needs no dump."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracekern.dump.fault import describe_wanted, has_not_waited
from tracekern.timeline.model import Rank

_NUMBERS = ("peer", "slot", "wanted_epoch", "seen_epoch", "seen_value", "waited_ns", "aborted_by")
_NUMBERS_OF_RING = ("ring", "role", "wanted_value", "head", "tail")
_TEXTS = ("cause", "kernel", "channel")
_MORE_TEXTS = ("slot_name", "value_name", "role_name", "ring_name")


@dataclass(frozen=True)
class Fault:
    """A wait that was given up."""

    peer: int
    """The rank waited for; the rank itself where for blocks of its own."""
    kernel: str
    what: str
    """What was waited for, and what was there instead."""
    waited_ns: int
    is_timeout: bool
    """Its own limit was over; else it stopped because of the rank `aborted_by`."""
    has_waited: bool
    """False where `aborted_by` had given up before."""
    aborted_by: int
    was_interrupted: bool
    """`aborted_by` was interrupted, such as by Ctrl-C."""


def fault_of(rank: Rank) -> Fault | None:
    """Returns None where no wait gave up, and where the dump says it in no way that can be read."""
    fault = rank.metadata.get("fault")
    if not isinstance(fault, dict) or not _is_sound(fault):
        return None
    return Fault(
        peer=fault["peer"],
        kernel=fault["kernel"],
        what=describe_wanted(fault),
        waited_ns=fault["waited_ns"],
        is_timeout=fault["cause"] == "timeout",
        has_waited=not has_not_waited(fault),
        aborted_by=fault["aborted_by"],
        was_interrupted=fault.get("was_interrupted") is True,
    )


def _is_sound(fault: dict[str, Any]) -> bool:
    """Returns whether a fault has all that describe_wanted() reads: the reader of dumps has not checked it."""
    numbers = [*_NUMBERS, *(key for key in ("wanted_call", "seen_call", "value") if key in fault)]
    numbers += _NUMBERS_OF_RING if "ring" in fault else ()
    texts = [*_TEXTS, *(key for key in _MORE_TEXTS if key in fault)]
    is_typed = all(type(fault.get(key)) is int for key in numbers) and all(type(fault.get(key)) is str for key in texts)
    is_decoded = ("wanted_call" in fault) == ("seen_call" in fault) and ("value_name" in fault) == ("value" in fault)
    return is_typed and is_decoded
