"""What a report says of a window is what the whole capture says of it: nothing is worked out anew from a cut one."""

from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from tests.scenarios import EVENTS, NUMBER
from tests.timelines import make_launch, make_rank, make_spans
from tracekern.analysis.findings import analyze
from tracekern.analysis.iterations import find_iterations
from tracekern.analysis.waits.analyze import Waits, analyze_waits
from tracekern.timeline.flows import join_flows
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, ClockFit, Timeline, Track, TrackKind
from tracekern.viewers.report.headlines import headlines

TRACES = Path(__file__).parent.parent / "traces"
CAPTURES = ("cpu_8_ranks", "h200x4", "h200x4_late_host")


def of_ranks(num_ranks: int, rows: list[tuple[int, ...]]) -> Timeline:
    """One warp a rank, in one launch each; rows as make_spans() takes them."""
    timeline = Timeline(
        unit="ns",
        ranks=tuple(
            make_rank(rank, clock=ClockFit("ping-pong" if rank else "reference", 1.0, 1.0)) for rank in range(num_ranks)
        ),
        tracks=tuple(Track(rank, TrackKind.DEVICE, "block 0 warp 0", block=0, warp=0) for rank in range(num_ranks)),
        events=EVENTS,
        launches=tuple(make_launch(rank) for rank in range(num_ranks)),
        spans=make_spans(rows),
    )
    return timeline.replace(flows=join_flows(timeline)[0])


def columns_of(waits: Waits) -> dict[str, list[int]]:
    names = [field.name for field in fields(waits) if field.name not in ("phases", "roles", "arrivals", "num_open")]
    return {name: getattr(waits, name).tolist() for name in names}


@pytest.mark.parametrize("name", CAPTURES)
def test_every_wait_is_divided_as_in_the_whole(name: str):
    timeline = load(TRACES / name)
    spans, whole = timeline.spans, analyze_waits(timeline)
    last = int(spans.end.max())
    for first in np.quantile(spans.start, (0.2, 0.5, 0.8)).astype(int).tolist():
        found = analyze(timeline, window=(first, last))
        reaches = (spans.end[whole.row] >= first) & (spans.start[whole.row] <= last)
        assert 0 < reaches.sum() < len(whole)
        assert columns_of(found.waits) == columns_of(whole.take(np.flatnonzero(reaches)))
        assert sum(cost.total_ns for cost in found.causes.costs) == pytest.approx(found.causes.charged_ns)
        assert sum(part.time_ns for part in found.critical_path.whole.parts) == found.critical_path.whole.makespan_ns


@pytest.mark.parametrize("name", CAPTURES)
def test_a_window_of_everything_is_the_whole(name: str):
    timeline = load(TRACES / name)
    window = (int(timeline.spans.start.min()), int(timeline.spans.end.max()))
    assert headlines(analyze(timeline, window=window)) == headlines(analyze(timeline))


def test_costs_of_two_halves_are_those_of_the_whole():
    timeline = load(TRACES / "h200x4")
    spans, waits = timeline.spans, analyze_waits(timeline)
    start, reach = np.sort(spans.start[waits.row]), np.maximum.accumulate(np.sort(spans.end[waits.row]))
    no_wait_open = np.flatnonzero(start[1:] > reach[:-1] + 1)
    cut = int(reach[no_wait_open[len(no_wait_open) // 2]])
    last = int(spans.end.max())

    def costs(*windows: tuple[int, int]) -> dict[tuple, float]:
        total: Counter = Counter()
        for window in windows:
            for cost in analyze(timeline, window=window).causes.costs:
                total[cost.rank, cost.target, cost.phase, cost.peer] += cost.total_ns
        return total

    halves, whole = costs((0, cut), (cut + 1, last)), costs((0, last))
    assert sum(halves.values()) == pytest.approx(sum(whole.values()), rel=1e-6)
    # Of each window what is below zero is no cause, and its largest causes are taken out: not those of its halves.
    for cause in halves | whole:
        assert halves[cause] == pytest.approx(whole[cause], abs=0.01 * sum(whole.values()))


def test_a_cause_before_the_window_is_charged():
    """Rank 0 copies for long, rank 1 waits for it, and so rank 2 waits for rank 1: only that lies in the window."""
    send, wait, copy = NUMBER["signal_token"], NUMBER["wait_token"], NUMBER["copy_token"]
    to_1, to_2 = 1, 2
    rows = [
        (0, copy, 0, 0, 500, 0, 0),
        (0, send, 0, 500, 501, to_1, 0),
        (1, wait, 1, 0, 502, 0, 0),
        (1, send, 1, 502, 503, to_2, 0),
        (2, wait, 2, 0, 504, 1, 0),
    ]
    found = analyze(of_ranks(3, rows), window=(503, 600))
    assert found.waits.rank.tolist() == [2]
    assert found.culprit.rank is None  # one iteration shows nothing
    assert found.causes.blames[0].rank == 0
    (work,) = [cost for cost in found.causes.costs if cost.target.value == "work"]
    assert (work.rank, work.direct_ns) == (0, 0)
    assert work.passed_on_ns > 490


def test_a_barrier_is_charged_to_the_rank_that_came_last():
    """Though its signal ended before the window, and another rank's, whose stores drain for long, did not."""
    signal, wait = NUMBER["signal_meeting"], NUMBER["wait_meeting"]
    to_2 = 2
    rows = [
        (0, signal, 0, 300_000, 1_000_000, to_2, 0),
        (1, signal, 1, 900_000, 910_000, to_2, 0),
        (2, signal, 2, 90_000, 91_000, to_2, 0),
        (2, wait, 2, 100_000, 1_001_000, 0, 0),
    ]
    found = analyze(of_ranks(3, rows), window=(950_000, 2_000_000))
    assert found.waits.peer.tolist() == [1]
    assert found.waits.barrier_late.tolist() == [800_000]
    assert found.verdict.rank == 1


@pytest.mark.parametrize("name", CAPTURES)
def test_an_iteration_of_which_a_part_lies_in_the_window_took_as_long_as_it_took(name: str):
    timeline = load(TRACES / name)
    whole = find_iterations(timeline)
    middle = len(whole) // 2
    inside = int((whole.start[middle] + whole.end[middle]) // 2)
    found = analyze(timeline, window=(inside, int(timeline.spans.end.max())))
    reaches = whole.end >= inside
    assert found.iterations.number.tolist() == whole.number[reaches].tolist()
    assert found.iterations.duration_ns.tolist() == whole.duration_ns[reaches].tolist()
    whole_paths = {path.iteration: path.makespan_ns for path in analyze(timeline).critical_path.iterations}
    of_window = {path.iteration: path.makespan_ns for path in found.critical_path.iterations}
    assert of_window.items() < whole_paths.items()


def test_who_is_held_up_does_not_depend_on_the_window():
    copy, wait = NUMBER["copy_token"], NUMBER["wait_token"]
    rows = [
        (0, copy, 0, 0, 1_400_000, 0, 0),
        (0, wait, 0, 1_500_000, int(OPEN_END), 1, 0),
        (1, copy, 1, 0, 2_900_000, 0, 0),
        (1, copy, 1, 3_000_000, int(OPEN_END), 0, 0),
    ]
    timeline = of_ranks(2, rows)
    found = analyze(timeline, window=(1_000_000, 2_000_000)).hang
    assert found == analyze(timeline).hang
    assert found.longest.lasts_ns == 1_500_000
    assert found.holders[0].doing == "dispatch.copy_token"


def test_a_window_in_which_the_chosen_ranks_did_nothing_is_refused(command_line, tmp_path):
    capture = TRACES / "cpu_8_ranks"
    spans, rank_of_track = (timeline := load(capture)).spans, timeline.track_ranks()
    first_ns = [int(spans.start[rank_of_track[spans.track] == rank].min()) for rank in range(8)]
    late = max(range(8), key=first_ns.__getitem__)
    window = ("--window", f"0:{first_ns[late] - 1}")
    result = command_line("export", capture, "-o", tmp_path / "t.json", "--ranks", late, *window)
    assert (result.returncode, (tmp_path / "t.json").exists()) == (2, False)
    assert "--window: nothing was recorded from 0 ns to " in result.stderr
    assert command_line("export", capture, "-o", tmp_path / "t.json", *window).returncode == 0
