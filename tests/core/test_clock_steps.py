"""Clocks that jump or change their rate between rounds: found, named, and inside the bound, or said to be assumed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from clock_captures import NUM_RANKS, Case, Truth, write_case
from hypothesis import given
from hypothesis import strategies as st

from tracekern.analysis.doubt import COVERED_SIGMAS, Bound, clock_doubt
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.summary import summarize
from tracekern.cli.commands.info import clock as clock_text
from tracekern.timeline.clocks.course import Course
from tracekern.timeline.clocks.fit import apply_clock
from tracekern.timeline.clocks.pairs import MAX_WANDER_PER_NS
from tracekern.timeline.clocks.steadiness import Steadiness, judge_pieces
from tracekern.timeline.load import load
from tracekern.timeline.model import Timeline
from tracekern.viewers.report.headlines import clocks, headlines

SECOND = 10**9
EVERY_3_S = np.arange(8) * 3.0 * SECOND


def judged(offset: np.ndarray, time: np.ndarray = EVERY_3_S, sigma_ns: float = 10.0) -> Steadiness:
    none = np.zeros(len(offset))
    return judge_pieces(time[: len(offset)], offset, none + sigma_ns, none, MAX_WANDER_PER_NS)


def jumped(num_rounds: int, piece: int, jump_ns: float, bend_ppm: float = 0.0) -> np.ndarray:
    """[k] offsets with a rate of 3 ppm that rises by bend_ppm a second, and a jump between two rounds."""
    time = EVERY_3_S[:num_rounds]
    steady = 3e-6 * time + bend_ppm * 1e-6 / 2 * time**2 / SECOND
    return steady + np.where(np.arange(num_rounds) > piece, jump_ns, 0.0)


@pytest.mark.parametrize("jump_ns", [1_200.0, -20_000.0])
@pytest.mark.parametrize(("num_rounds", "piece"), [(4, 0), (4, 1), (5, 0), (5, 2), (5, 3), (8, 4)])
def test_a_jump_is_found_in_its_piece_alone(num_rounds, piece, jump_ns):
    found = judged(jumped(num_rounds, piece, jump_ns, bend_ppm=0.02))
    assert np.flatnonzero(found.is_contradicted).tolist() == [piece]
    assert np.flatnonzero(found.doubt_ns).tolist() == [piece]
    assert abs(jump_ns) <= found.doubt_ns[piece] + 2 * 0.06e-6 * 3 * SECOND <= abs(jump_ns) + 900


def test_either_of_two_pieces_may_be_the_one():
    found = judged(jumped(3, 1, 3_000))
    assert found.is_contradicted.tolist() == [True, True]
    assert found.doubt_ns.min() >= 3_000


@pytest.mark.parametrize("bend_ppm", [0.0, 0.035, -0.1])
@pytest.mark.parametrize("num_rounds", [2, 3, 4, 8])
def test_a_rate_that_wanders_contradicts_nothing(bend_ppm, num_rounds):
    found = judged(jumped(num_rounds, 0, 0, bend_ppm))
    assert not found.is_contradicted.any()
    # Of two pieces whose rates differ by 0.3 ppm one may hide a jump; of three a course shows.
    assert found.doubt_ns.any() == (num_rounds == 3 and abs(bend_ppm) == 0.1)


def test_a_rate_that_steps_is_found_around_it():
    offset = 2e-6 * EVERY_3_S - 8e-6 * np.maximum(EVERY_3_S - 10 * SECOND, 0)
    found = judged(offset)
    assert found.is_contradicted[3]
    assert not found.is_contradicted[[0, 1, 5, 6]].any()
    # The line through both rounds is off by 8 ppm of a third of 3 s times two thirds.
    assert found.doubt_ns[3] >= 8e-6 * SECOND * 2 / 3


@pytest.mark.parametrize("piece", range(3))
def test_a_round_soon_after_another_hides_no_jump(piece):
    """As when a capture closes 50 ms after a round: no slope of its own comes from there."""
    time = np.array([0, 3, 6, 6.05]) * SECOND
    found = judged(3e-6 * time + np.where(np.arange(4) > piece, 5_000, 0), time)
    assert found.is_contradicted[piece]
    assert found.doubt_ns[piece] >= 5_000


def test_what_noise_may_hide_is_known():
    assert np.isinf(judged(jumped(2, 0, 0)).hidden_ns).all()
    near, noisy = judged(jumped(4, 0, 0)).hidden_ns, judged(jumped(4, 0, 0), sigma_ns=200).hidden_ns
    assert 300 < near.min() <= near.max() < 600 < 1_500 < noisy.min()


@given(
    share=st.floats(0, 1),
    jump=st.floats(-1e5, 1e5),
    window=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)
def test_a_jump_stays_within_the_bound_of_its_piece(share, jump, window):
    """Wherever it is, and no further than for the time that is asked for."""
    first, last = (SECOND * (1 + part) for part in window)
    rounds = np.arange(3) * float(SECOND)
    course = Course(rounds, np.array([0, 0, jump]), np.full(3, 10.0), 1e-3, 0.0, doubt_ns=np.array([0, abs(jump)]))
    times = np.linspace(first, last, 50)
    truth = np.where(times >= SECOND * (1 + share), jump, 0.0)
    off = np.abs(truth - np.interp(times, rounds, course.offset)).max()
    assert off <= course.error_within(first, last) <= abs(jump) + 10 + 1e-6
    assert course.error_within(0, 0.9 * SECOND) == 10


def capture(directory: Path, case: Case, seed: int, num_rounds: int) -> tuple[Timeline, Truth, dict[int, float]]:
    """The merged capture, its truth, and by how much the events of each rank are off, ns."""
    truth = write_case(directory, case, seed, num_rounds)
    timeline = load(directory)
    fits = {rank.rank: rank.clock for rank in timeline.ranks}
    (reference,) = [rank for rank, fit in fits.items() if fit.method == "reference"]
    errors = {
        rank: float(np.abs(truth.errors_ns(rank, reference, apply_clock(fit, truth.ticks[rank]))).max())
        for rank, fit in fits.items()
        if rank != reference
    }
    for rank, error_ns in errors.items():
        assert error_ns <= fits[rank].hard_ns or not fits[rank].is_checked
    return timeline, truth, errors


def said(timeline: Timeline) -> list[str]:
    return [problem.text for problem in timeline.problems]


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize("num_rounds", [2, 3, 5])
def test_sound_clocks_raise_no_alarm_and_keep_their_bound(tmp_path, flows, num_rounds):
    for seed in range(900, 902):
        timeline, _, _ = capture(tmp_path / str(seed), Case(flows=flows), seed, num_rounds)
        assert said(timeline) == []
        assert max(rank.clock.hard_ns for rank in timeline.ranks) < 720
        assert max(rank.clock.doubt_ns for rank in timeline.ranks) == 0


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize(
    "case", [Case(jump_ns=1_500), Case(jump_ns=20_000), Case(rate_step=8e-6), Case(jump_ns=800), Case(wander=3e-7)]
)
def test_what_clocks_do_between_rounds_stays_within_the_bound(tmp_path, case, flows):
    case = dataclasses.replace(case, flows=flows)
    for seed in range(950, 953):
        timeline, _, _ = capture(tmp_path / str(seed), case, seed, 3 + seed % 3)
        if case.jump_ns >= 1_500:
            assert any("jumped by up to" in text for text in said(timeline))
        if case.wander > 2e-7:
            assert said(timeline) == []


@pytest.mark.parametrize("seed", range(970, 976))
def test_rank_time_and_amount_of_a_jump_are_said(tmp_path, seed):
    timeline, truth, errors = capture(tmp_path, Case(jump_ns=3_000), seed, 5)
    (problem,) = timeline.problems
    assert (problem.severity, problem.kind, problem.rank) == ("warning", "clock_step", truth.rank)
    assert f"the clock of rank {truth.rank} jumped by up to 3." in problem.text
    begin, end = map(float, re.search(r"between (\S+) s and (\S+) s of the trace", problem.text).groups())
    first_s = truth.first_ns / SECOND
    assert begin - 0.02 <= truth.event_at / SECOND - first_s <= end + 0.02
    assert end - begin < 3.5
    clock = timeline.ranks[truth.rank].clock
    if clock.method == "ping-pong":  # not the axis: all others are as good as ever
        assert 2_500 < clock.doubt_ns < clock.hard_ns
        assert max(rank.clock.hard_ns for rank in timeline.ranks if rank.rank != truth.rank) < 720
        assert max(error for rank, error in errors.items() if rank != truth.rank) < 150


def test_the_rank_that_jumps_is_not_the_axis(tmp_path):
    seeds = [seed for seed in range(980, 995) if write_case(tmp_path / str(seed), Case(3_000), seed, 4).rank == 0]
    assert seeds
    for seed in seeds:
        timeline = load(tmp_path / str(seed))
        assert timeline.ranks[0].clock.method == "ping-pong"
        assert [problem.rank for problem in timeline.problems] == [0]


def test_two_clocks_do_not_tell_which_of_them_jumped(tmp_path):
    truth = write_case(tmp_path, Case(jump_ns=3_000), 1_020, 4)
    others = [rank for rank in range(NUM_RANKS) if rank not in (truth.rank, (truth.rank + 1) % NUM_RANKS)]
    for rank in others:
        (tmp_path / f"rank_{rank:05d}.tkdump").unlink()
    (text,) = [text for text in said(load(tmp_path, partial=True)) if "jumped" in text]
    one, other = sorted({*range(NUM_RANKS)} - {*others})
    assert text.startswith(f"one of the clocks of ranks {one} and {other} jumped by up to 3.")


def test_flows_that_contradict_two_rounds_widen_the_bound_until_it_holds(tmp_path):
    for seed in range(1_030, 1_040):
        timeline, _, errors = capture(tmp_path / str(seed), Case(jump_ns=3_000, flows=True), seed, 2)
        (text,) = [problem.text for problem in timeline.problems if problem.kind == "contradicting_flows"]
        for rank, error_ns in errors.items():
            clock = timeline.ranks[rank].clock
            assert error_ns <= clock.hard_ns
            if clock.hard_ns > 720:
                assert re.search(rf"hard_ns grows: .*rank {rank} from \d+ ns to \S+ us \(at \S+ m?s\)", text)
                assert clock.doubt_ns == clock.hard_ns


def test_a_way_that_is_slower_widens_what_is_likely(tmp_path):
    for seed in range(1_050, 1_055):
        timeline, truth, errors = capture(tmp_path / str(seed), Case(slower_ns=3_000, flows=True), seed, 3)
        off = {problem.rank for problem in timeline.problems if problem.kind == "fit_outside_flows"}
        assert off == {rank for rank, error in errors.items() if error > 1_000} != set()
        likely = clock_doubt(timeline, Bound.LIKELY)
        for rank, error in errors.items():
            clock = timeline.ranks[rank].clock
            assert error <= likely[rank] + 64
            assert likely[rank] == np.ceil(clock.hard_ns if rank in off else COVERED_SIGMAS * clock.sigma_ns)
        assert "likely off by up to 2." in clocks(analyze(timeline))


def trust(timeline: Timeline) -> str:
    (line,) = [line.text for line in headlines(analyze(timeline)) if line.word == "trust"]
    return line


@pytest.mark.parametrize(("num_rounds", "flows", "assumes"), [(2, False, True), (3, False, False), (2, True, False)])
def test_what_nothing_checks_is_said_to_be_assumed(tmp_path, num_rounds, flows, assumes):
    timeline, _, _ = capture(tmp_path, Case(flows=flows), 1_061, num_rounds)
    assert ("assumed that no clock jumps or changes its rate by more than 0.1 ppm/s" in trust(timeline)) == assumes
    texts = [clock_text(rank) for rank in summarize(timeline).ranks]
    assert any(text.endswith("assumes at most 0.1 ppm/s") for text in texts) == assumes
