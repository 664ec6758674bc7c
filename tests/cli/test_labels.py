"""What a stranger reads on a trace: its title, its ranks, and what was lost."""

from __future__ import annotations

from timelines import make_rank, make_timeline

from tracekern.export.labels import UNALIGNED, about, banner, rank_label, title
from tracekern.timeline.model import Problem


def problems(*kinds: str, count: int = 1) -> tuple[Problem, ...]:
    return tuple(Problem("error", kind, 0, -1, "a problem", count) for kind in kinds)


def test_a_banner_says_what_there_is_to_say_and_no_more():
    quiet = make_timeline(ranks=(make_rank(0, metadata={}),))
    assert banner(quiet) == "about this trace"
    assert banner(quiet, 1) == "1 span of other warps left out: one row per block and role"
    doubtful = make_timeline(aligned=False, problems=problems("salvaged", "fault"))
    assert banner(doubtful) == f"CPU backend: never durations · {UNALIGNED} · 1 fault, 1 salvaged"


def test_a_title_says_unaligned_once():
    assert title(make_timeline(aligned=False)) == "tracekern: UNALIGNED moe dispatch"
    assert title(make_timeline(aligned=False, title="Unaligned base")) == "tracekern: Unaligned base"
    assert title(make_timeline(title="")) == "tracekern: trace"


def test_a_rank_is_named_with_its_node_where_there_are_several_its_end_and_its_clock():
    assert rank_label(make_rank(0), 1) == "rank 0 clock reference"
    assert rank_label(make_rank(1, state="salvaged", label="head"), 2) == "head @node-a SALVAGED ±800 ns"
    assert rank_label(make_rank(1, clock=None), 2) == "rank 1 @node-a"
    ranks = (make_rank(0), make_rank(1), make_rank(2, clock=None))
    facts = about(make_timeline(3, ranks=ranks))
    assert [facts[f"rank_{rank}"].removeprefix("simulated on node-a, backend cpu, closed, ") for rank in range(3)] == [
        "clock reference",
        "clock by ping-pong, ±800 ns proven, ±90 ns repeatable",
        "clock not fitted",
    ]
