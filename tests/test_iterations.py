"""Launches of all ranks put together to iterations."""

from __future__ import annotations

import dataclasses

import pytest
from timelines import LAUNCH, make_launch, make_spans, make_timeline

from tracekern.analysis.iterations import find_iterations
from tracekern.timeline.model import OPEN_END, Flows, Problem

# launch index -> rank and sequence: two ranks, three iterations of two kernels, and one barrier before them
LAUNCHES = tuple(
    dataclasses.replace(make_launch(rank, name), sequence=sequence)
    for rank, name, sequence in [
        (0, "dispatch", 0),
        (0, "combine", 0),
        (0, "dispatch", 1),
        (1, "dispatch", 0),
        (1, "dispatch", 1),
        (0, "dispatch", 2),
        (0, "combine", 1),
        (0, "combine", 2),
        (0, "barrier", 0),
    ]
)


def iterations_of(*rows: tuple[int, int, int]):
    spans = make_spans((8 * LAUNCHES[launch].rank, LAUNCH, launch, start, end, 0, 0) for launch, start, end in rows)
    return find_iterations(make_timeline(launches=LAUNCHES, spans=spans, flows=Flows()))


def test_an_iteration_reaches_from_the_first_kernel_to_the_last_of_any_rank():
    found = iterations_of(
        (8, 10, 90), (0, 100, 200), (1, 250, 300), (3, 90, 280), (2, 310, 420), (4, 305, 330), (5, 500, 505)
    )
    assert found.number.tolist() == [0, 1, 2]
    assert found.start.tolist() == [90, 305, 500]
    assert found.duration_ns.tolist() == [210, 115, 5]
    assert found.best_median_worst() == (2, 1, 0)


def test_an_iteration_that_never_ended_is_none():
    assert iterations_of((0, 100, 200), (3, 90, OPEN_END), (2, 310, 420)).number.tolist() == [1]


def test_a_kernel_launched_twice_as_often_belongs_to_each_iteration_twice():
    launches = [make_launch(0, name) for name in ("send", "recv", "send", "recv", "wait", "wait", "wait", "wait")]
    numbers = (0, 0, 1, 1, 0, 1, 2, 3)
    launches = tuple(dataclasses.replace(entry, sequence=n) for entry, n in zip(launches, numbers, strict=True))
    spans = make_spans((0, LAUNCH, launch, 100 * launch, 100 * launch + 9, 0, 0) for launch in range(8))
    found = find_iterations(make_timeline(launches=launches, spans=spans, flows=Flows()))
    assert found.of_launch.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert (found.start.tolist(), found.end.tolist()) == ([0, 200], [509, 709])


def test_no_launch_no_iteration():
    assert len(iterations_of()) == 0


def test_clocks_that_are_not_aligned_give_no_iteration():
    assert len(find_iterations(make_timeline(2))) == 1
    assert len(find_iterations(make_timeline(2, aligned=False))) == 0
    assert len(find_iterations(make_timeline(1, aligned=False))) == 1


def calls_of(kept: dict[str, range], **changes: object):
    """Iterations of one rank that kept these launches of each name, call i from 1000 * i on."""
    launches = [
        dataclasses.replace(make_launch(0, name), sequence=sequence)
        for name, sequences in kept.items()
        for sequence in sequences
    ]
    begin = {name: 100 * place for place, name in enumerate(kept)}
    start = [1000 * launch.sequence + begin[launch.name] for launch in launches]
    rows = [(0, LAUNCH, idx, begin, begin + 50, 0, 0) for idx, begin in enumerate(start)]
    return find_iterations(make_timeline(1, launches=tuple(launches), spans=make_spans(rows), flows=Flows(), **changes))


@pytest.mark.parametrize("oldest", [(11, 10, 10), (11, 11, 10), (10, 8, 10), (1, 0, 0)], ids=str)
def test_a_flight_recorder_that_kept_more_of_one_kernel_than_of_another(oldest):
    names = ("dispatch", "combine", "finish")
    found = calls_of({name: range(first, 20) for name, first in zip(names, oldest, strict=True)})
    assert found.start.tolist() == [1000 * call for call in range(max(oldest), 20)]
    assert set(found.duration_ns.tolist()) == {250}


@pytest.mark.parametrize("hung_in", range(3))
def test_calls_before_the_one_that_hung_are_whole(hung_in):
    names = ("dispatch", "combine", "finish")
    kept = {name: range(8 + (place <= hung_in)) for place, name in enumerate(names)} | {"set_up": range(1)}
    problem = Problem("error", "open_span", 0, -1, "wait_token never closed")
    found = calls_of(kept, problems=(problem,))
    assert found.start.tolist() == [1000 * call for call in range(8 + (hung_in == 2))]
    assert set(found.duration_ns.tolist()) == {250}


def test_each_third_launch_of_kernels_that_are_launched_once_and_twice_a_call():
    found = calls_of({"dispatch": range(0, 12, 3), "combine": range(0, 24, 3), "finish": range(0, 12, 3)})
    assert found.of_launch.tolist() == [0, 1, 2, 3, 0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 3]
    kept_last = calls_of({"dispatch": range(33, 60, 3), "combine": range(30, 60, 3), "finish": range(30, 60, 3)})
    assert kept_last.start.tolist() == [1000 * call for call in range(33, 60, 3)]
