"""What load() says of a run beyond its rows: problems of flows, times and groups, and bounds of clocks.

All of it follows from numbers that add up over the parts of a run; a run in memory is a single part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tracekern.errors import BadInput
from tracekern.timeline.clocks.flow_bounds import Proven, can_tighten, last_event_ns, step_problems, tighten_clocks
from tracekern.timeline.facts.stages import stages_of
from tracekern.timeline.join.calls import CallKeys
from tracekern.timeline.join.damage import TrackTimes, damaged_times
from tracekern.timeline.join.flows import join_part
from tracekern.timeline.join.members import exchanging_launches, group_problems
from tracekern.timeline.join.misfits import Misfits
from tracekern.timeline.model import LOSS_KINDS, Channel, Mask, Problem, Timeline


@dataclass(frozen=True)
class Checks:
    """What has to be known of the rows of some calls. Adds up over the parts of a run."""

    misfits: Misfits
    times: TrackTimes
    proven: Proven | None
    """None where flows say nothing of clocks."""
    exchanging: Mask | None
    """[num_launches] as exchanging_launches(); None for a capture of all ranks."""

    def __add__(self, other: Checks) -> Checks:
        return Checks(
            self.misfits + other.misfits,
            self.times + other.times,
            self.proven + other.proven if self.proven and other.proven else None,
            None if self.exchanging is None or other.exchanging is None else self.exchanging | other.exchanging,
        )


def join_and_check(
    timeline: Timeline, calls: Mapping[Channel, CallKeys], last_ns: int | None = None
) -> tuple[Timeline, Checks]:
    """The part with its flows, and what has to be known of it.

    calls: what tells calls of channels apart in the whole run, see join_part(). last_ns: last_event_ns() of the run;
    without, of this part.
    """
    flows, misfits = join_part(timeline, calls)
    timeline = timeline.replace(flows=flows)
    is_group = any(rank.metadata.get("ranks") for rank in timeline.ranks)
    checks = Checks(
        misfits,
        TrackTimes.of(timeline),
        Proven.of(timeline, last_event_ns(timeline) if last_ns is None else last_ns) if can_tighten(timeline) else None,
        exchanging_launches(timeline) if is_group else None,
    )
    return timeline, checks


def finish(timeline: Timeline, checks: Checks, is_astray: Mapping[Channel, Mask], strict: bool) -> Timeline:
    """The timeline with bounds of clocks as flows prove them, and with all problems.

    checks: of the whole run. is_astray: as find_astray() of `checks.misfits.lacking`, of the whole run. Raises BadInput
    if it is `strict` and something was lost.
    """
    ranks, contradictions = tighten_clocks(timeline, checks.proven)
    found = (*checks.misfits.problems(timeline, is_astray), *step_problems(timeline), *contradictions)
    timeline = timeline.replace(ranks=ranks, problems=(*timeline.problems, *found))
    problems = (
        *damaged_times(timeline, checks.times),
        *timeline.problems,
        *group_problems(timeline, checks.exchanging),
        *_unequal_keys(timeline),
    )
    timeline = timeline.replace(problems=problems)
    if strict:
        _refuse_losses(timeline)
    return timeline


def _unequal_keys(timeline: Timeline) -> list[Problem]:
    """Names launches that are of one stage and have one number on all ranks, but another key on some."""
    stages, keys = stages_of(timeline), dict[tuple[str, int], dict[str, int]]()
    for stage, launch in zip(stages.of_launch.tolist(), timeline.launches, strict=True):
        keys.setdefault((stages.names[stage], launch.sequence), {}).setdefault(launch.key, launch.rank)
    unequal = [(launch, of_ranks) for launch, of_ranks in keys.items() if len(set(of_ranks.values())) > 1]
    if not unequal:
        return []
    (name, number), of_ranks = unequal[0]
    named = " and ".join(f"{key!r} on rank {rank}" for key, rank in list(of_ranks.items())[:2])
    more = f", and so {'is another one' if len(unequal) == 2 else f'are {len(unequal) - 1:,} others'}"
    text = (
        f"launch {number} of {name} is {named}{more if len(unequal) > 1 else ''}: ranks are compared launch by launch, "
        "whatever the keys; tracekern.start() begins at one that all have in common"
    )
    return [Problem("note", "unequal_keys", next(iter(of_ranks.values())), -1, text, len(unequal))]


def _refuse_losses(timeline: Timeline) -> None:
    losses = [problem for problem in timeline.problems if problem.kind in LOSS_KINDS]
    if losses:
        more = f" (and {len(losses) - 1} more)" if len(losses) > 1 else ""
        raise BadInput(f"{losses[0].text}{more}; record again, or merge without --strict")
