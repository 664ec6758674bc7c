"""What a report says of a window is what the whole capture says of it: nothing is worked out anew from a cut one."""

from dataclasses import fields

import numpy as np
import pytest

from tests.paths import TRACES
from tests.scenarios import EVENTS, NUMBER
from tests.timelines import make_launch, make_rank, make_spans
from tracekern.analysis.findings import analyze
from tracekern.analysis.waits.analyze import Waits, analyze_waits
from tracekern.timeline.facts.iterations import find_iterations
from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, ClockFit, Timeline, Track, TrackKind
from tracekern.viewers.report.headlines import headlines

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
    others = ("phases", "phase_numbers", "roles", "arrivals", "num_open")
    names = [field.name for field in fields(waits) if field.name not in others]
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
        assert sum(part.time_ns for part in found.critical_path.whole.parts) == found.critical_path.whole.makespan_ns


@pytest.mark.parametrize("name", CAPTURES)
def test_of_a_window_no_cost_is_said_and_all_else_as_of_the_whole(name: str):
    timeline = load(TRACES / name)
    window = (int(timeline.spans.start.min()), int(timeline.spans.end.max()))
    of_window, whole = (
        {line.word: line.text for line in headlines(found)}
        for found in (analyze(timeline, window=window), analyze(timeline))
    )
    assert of_window["verdict"] == "No cause is named: what a cause costs is said of the whole run, not of a window."
    for word in ("waiting", "bound"):
        assert of_window[word] == whole[word]
    assert of_window["trust"].startswith(whole["trust"])  # of the CPU backend it says what else the verdict would


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
