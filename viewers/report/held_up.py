"""What is said of a run that broke off or hangs: who did not come, and what each rank waited for."""

from __future__ import annotations

from tracekern.analysis.questions.held_up import HeldUp, LastWait
from tracekern.formatting import duration, ranks

_MOST_TOLD = 3


def describe_held_up(held: HeldUp) -> str:
    """The verdict about such a run."""
    waits = [wait for wait in held.waits if wait.peer in held.missing] or list(held.waits)
    waited = "has waited" if held.is_running else "waited"
    if held.interrupted is not None:
        return f"Rank {held.interrupted} was interrupted (Ctrl-C), and that ended the run."
    if not waits:
        return "The run broke off: a wait was given up. What the ranks waited for is not on record."
    longest = max(waits, key=lambda wait: wait.lasts_ns)
    told = f"rank {longest.rank} {waited} {_how_long(longest)} for {_whom(longest)} {_in_brackets(longest)}"
    if not held.missing:
        verb = "wait" if held.is_running else "waited"
        return f"All ranks on record {verb} for each other: {told}."
    missing = ranks(held.missing).capitalize()
    does, in_time = ("does" if len(held.missing) == 1 else "do", "") if held.is_running else ("did", " in time")
    others = sorted({wait.rank for wait in waits} - {longest.rank})
    also = f", and so {'have' if held.is_running else 'did'} {ranks(others)}" if others else ""
    return f"{missing} {does} not come{in_time}: {told}{also}."


def describe_waits(held: HeldUp, told: int) -> list[str]:
    """What each rank waited for but the rank `told`, and which came when another one had given up."""
    others = [wait for wait in held.waits if wait.rank != told]
    texts = [
        f"rank {wait.rank} waited {_how_long(wait)} for {_whom(wait)} {_in_brackets(wait)}"
        for wait in others[:_MOST_TOLD]
    ]
    if rest := [wait.rank for wait in others[_MOST_TOLD:]]:
        texts.append(f"so did {ranks(rest)}")
    if late := [rank for rank in held.came_after if rank != told]:
        texts.append(f"{ranks(late)} came after that")
    return texts


def _how_long(wait: LastWait) -> str:
    return ("at least " if wait.at_least else "") + duration(wait.lasts_ns)


def _whom(wait: LastWait) -> str:
    return "other warps of its own" if wait.peer == wait.rank else f"rank {wait.peer}"


def _in_brackets(wait: LastWait) -> str:
    return f"({', '.join(filter(None, (wait.phase, wait.what)))})"
