"""What ranks tell each other before they begin together: the settings of each, or its problem.

All ranks hear the same, and so all raise the same error: none waits for one that has refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tracekern.errors import BadInput, one_line

MAX_TEXT = 600
"""Most characters of a problem that other ranks are told."""

Check = Callable[[], dict[str, Any]]
"""Returns the settings in which ranks may not differ, as JSON holds them. Raises BadInput for what cannot be."""


class Said:
    """What one rank says: the outcome of its check."""

    def __init__(self, check: Check) -> None:
        self.error: Exception | None = None
        self.settings: dict[str, Any] = {}
        try:
            self.settings = check()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            self.error = error

    @property
    def problem(self) -> str:
        """Returns one line; "" for none."""
        if self.error is None:
            return ""
        return one_line(self.error)[:MAX_TEXT]

    def message(self) -> list[Any]:
        return [self.problem, self.settings]

    def settle(self, heard: Sequence[list[Any]], ranks: Sequence[int] = range(1 << 15)) -> None:
        """Raises what is wrong: the same BadInput on all ranks, but an own error of another kind as it is.

        heard: message() of each rank, [num_ranks]. ranks: what the run calls them.
        """
        if self.error is not None and not isinstance(self.error, BadInput):
            raise self.error
        problems = [problem for problem, _ in heard]
        for rank, problem in zip(ranks, problems, strict=False):
            if problem:
                raise BadInput(problem if problems.count(problem) == len(problems) else f"rank {rank}: {problem}")
        first = heard[0][1]
        for rank, (_, theirs) in zip(ranks, heard, strict=False):
            for name in first:
                if theirs.get(name) != first[name]:
                    told = f"{name} is {first[name]} on rank {ranks[0]} and {theirs.get(name)} on rank {rank}"
                    raise BadInput(told)


def refuse_different_calls(names: Sequence[str], ranks: Sequence[int]) -> None:
    """Raises BadInput unless all ranks are in the same call. names: of the call of each rank. ranks: what the run calls
    them."""
    for rank, name in zip(ranks, names, strict=False):  # of ranks that nothing connects only the own one
        if name != names[0]:
            told = f"rank {ranks[0]} is in {names[0]}, rank {rank} in {name}"
            raise BadInput(f"{told}: all ranks make the same calls in the same order")
