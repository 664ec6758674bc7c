"""Launches of all ranks put together to iterations."""

from __future__ import annotations

import dataclasses

import pytest
from timelines import LAUNCH, make_launch, make_spans, make_timeline

from tracekern.timeline.facts.iterations import LaunchIterations, find_iterations
from tracekern.timeline.model import OPEN_END, Flows, Problem, Timeline

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


def test_one_epoch_for_all_calls_tells_no_calls_apart():
    """Kernels that signal may have one epoch for all calls, beside kernels that know none."""
    launches = [dataclasses.replace(make_launch(0, "send"), sequence=n, epoch=1) for n in range(3)]
    launches += [dataclasses.replace(make_launch(0, "scale"), sequence=n, epoch=0) for n in range(3)]
    spans = make_spans((0, LAUNCH, launch, 100 * launch, 100 * launch + 9, 0, 0) for launch in range(6))
    found = LaunchIterations(make_timeline(launches=tuple(launches), spans=spans, flows=Flows()))
    assert found.of_launch.tolist() == [0, 1, 2, 0, 1, 2]


def test_one_call_by_partitions_is_one_iteration():
    """Its one epoch follows that of the barrier ahead."""
    names = ("align", *("dispatch", "combine") * 3)
    launches = [
        dataclasses.replace(make_launch(0, name), sequence=max(0, (n - 1) // 2), epoch=2**32 - 1 if n == 0 else 1)
        for n, name in enumerate(names)
    ]
    assert LaunchIterations(make_timeline(launches=tuple(launches), spans=make_spans(()), flows=Flows())).count == 1


def test_no_launch_no_iteration():
    assert len(iterations_of()) == 0


def test_clocks_that_are_not_aligned_give_no_iteration():
    assert len(find_iterations(make_timeline(2))) == 1
    assert len(find_iterations(make_timeline(2, aligned=False))) == 0
    assert len(find_iterations(make_timeline(1, aligned=False))) == 1


def timeline_of(kept: dict[str, range], **changes: object) -> Timeline:
    """One rank that kept these launches of each name, call i from 1000 * i on."""
    launches = [
        dataclasses.replace(make_launch(0, name), sequence=sequence)
        for name, sequences in kept.items()
        for sequence in sequences
    ]
    begin = {name: 100 * place for place, name in enumerate(kept)}
    start = [1000 * launch.sequence + begin[launch.name] for launch in launches]
    rows = [(0, LAUNCH, idx, begin, begin + 50, 0, 0) for idx, begin in enumerate(start)]
    return make_timeline(1, launches=tuple(launches), spans=make_spans(rows), flows=Flows(), **changes)


def calls_of(kept: dict[str, range], **changes: object):
    return find_iterations(timeline_of(kept, **changes))


@pytest.mark.parametrize("oldest", [(11, 10, 10), (11, 11, 10), (10, 8, 10), (1, 0, 0)], ids=str)
def test_a_flight_recorder_that_kept_more_of_one_kernel_than_of_another(oldest):
    names = ("dispatch", "combine", "finish")
    found = calls_of({name: range(first, 20) for name, first in zip(names, oldest, strict=True)})
    assert found.start.tolist() == [1000 * call for call in range(max(oldest), 20)]
    assert set(found.duration_ns.tolist()) == {250}


@pytest.mark.parametrize("every", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("num_calls", [24, 25])
def test_a_stage_that_runs_twice_stays_in_its_iteration_however_few_launches_are_kept(every: int, num_calls: int):
    kept = {"a": range(0, num_calls, every), "b": range(0, 2 * num_calls, every), "c": range(0, num_calls, every)}
    launches = LaunchIterations(timeline_of(kept))
    assert not launches.set_up_stages
    calls = [*kept["a"], *(number // 2 for number in kept["b"]), *kept["c"]]
    numbers = {call: number for number, call in enumerate(sorted(set(calls)))}
    assert launches.of_launch.tolist() == [numbers[call] for call in calls]
    assert launches.is_whole.tolist() == [every == 1] * len(numbers)


@pytest.mark.parametrize("every", [1, 3, 7])
def test_each_nth_launch_of_stages_that_run_once_makes_whole_iterations(every: int):
    found = calls_of({"a": range(0, 24, every), "b": range(0, 24, every), "set_up": range(1)})
    assert set(found.duration_ns.tolist()) == {150}
    assert found.start.tolist() == [1000 * call for call in range(0, 24, every)]


@pytest.mark.parametrize(
    ("launched", "count", "set_up"),
    [
        ({"a": 24, "b": 48}, 24, ()),
        ({"a": 24, "b": 48, "c": 96}, 24, ()),
        ({"a": 24, "b": 49}, 49, ("a",)),
        ({"set_up": 1, "a": 24}, 24, ("set_up",)),
        ({"a": 24, "b": 48, "c": 48}, 48, ("a",)),
    ],
    ids=str,
)
def test_of_equally_common_numbers_of_launches_a_part_of_the_other(launched, count, set_up):
    launches = LaunchIterations(timeline_of({name: range(times) for name, times in launched.items()}))
    assert (launches.count, launches.set_up_stages) == (count, set_up)


@pytest.mark.parametrize(
    ("launched", "start_up"),
    [
        ({"rank_barrier": 1, "a": 3, "b": 3}, ["rank_barrier"]),
        ({"rank_barrier": 1, "a": 1, "b": 1}, ["rank_barrier"]),
        ({"a": 1, "rank_barrier": 1}, []),
        ({"rank_barrier": 3, "a": 3}, []),
        ({"rank_barrier": 1}, []),
        ({"prepare": 1, "a": 3, "b": 3, "finish": 1}, ["prepare"]),
    ],
    ids=str,
)
def test_set_up_ahead_of_the_first_iteration_is_start_up(launched: dict[str, int], start_up: list[str]):
    timeline = timeline_of({name: range(times) for name, times in launched.items()})
    launches = LaunchIterations(timeline)
    of_start_up = zip(timeline.launches, launches.is_start_up.tolist(), strict=True)
    assert [launch.name for launch, is_start_up in of_start_up if is_start_up] == start_up
    assert (launches.of_launch[launches.is_start_up] == -1).all()


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
    # Launches 0, 3, 6 and 9 of `dispatch`, and of the two `combine` each of iterations 0, 1, 3, 4, 6, 7, 9 and 10 one.
    assert found.of_launch.tolist() == [0, 2, 4, 6, 0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 4, 6]
    assert len(found) == 0
    kept_last = calls_of({"dispatch": range(33, 60, 3), "combine": range(30, 60, 3), "finish": range(30, 60, 3)})
    assert kept_last.start.tolist() == [1000 * call for call in range(33, 60, 3)]
