"""What a run would save without its causes, and who is named: simulated runs of known truth, and kept captures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from scenarios import exchange, with_clocks
from simulator import (
    Case,
    Drain,
    ExtraKernel,
    Injection,
    LateHost,
    Latency,
    LatencyOut,
    MoreWork,
    MovingWork,
    Shape,
    SlowPause,
    SlowWarp,
    SlowWork,
    SmallRing,
    programs,
    simulate,
)
from simulator.engine import Launch, Program, Signal, Wait, Work

import tracekern
from tests.paths import TRACES
from tracekern.analysis.findings import Findings, analyze
from tracekern.analysis.why.answer import Answer, Silence
from tracekern.analysis.why.candidates import Candidate, CauseKind
from tracekern.formatting import duration
from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.model import Flows, Problem, Timeline, TrackKind
from tracekern.timeline.select import select
from tracekern.viewers.report.headlines import headlines

DELAY_NS = 5_000
SLOW = SlowWork(DELAY_NS, rank=2)
REAL = Case(Shape.PIPELINE, 4, 10, num_warps=16, noise=0.03)


def findings_of(case: Case, seed: int, directory: Path) -> Findings:
    return Findings(tracekern.load(simulate(case, seed, directory).directory))


def named(answer: Answer) -> list[Candidate]:
    """The candidates that are named, each rank of a set by itself."""
    found = [cause.candidate for cause in answer.causes]
    return [dataclasses.replace(one, rank=rank, others=(), node="") for one in found for rank in one.ranks]


def lines_of(timeline: Timeline) -> dict[str, str]:
    return {line.word: line.text for line in headlines(analyze(timeline))}


def of_rank(rank: int, kind: CauseKind = CauseKind.PACE) -> Candidate:
    return Candidate(kind, rank)


@pytest.mark.parametrize(
    ("case", "wanted", "said"),
    [
        (Case(Shape.CHAIN, 8, 10, (SLOW,), 0.02), of_rank(2), "Rank 2 is slow: each stage.compute takes 1."),
        (
            Case(Shape.RING, 8, 50, (SLOW,), 0.02, is_persistent=True),
            of_rank(2),
            "Rank 2 is slow: each persistent.compute ",
        ),
        (Case(Shape.RING, 8, 10, (SLOW,), 0.02), of_rank(2), "Rank 2 is slow: each step.compute takes 1."),
        (
            Case(Shape.BARRIER, 4, 10, (SlowPause(DELAY_NS, rank=2),), pause_ns=3_000),
            of_rank(2),
            "Rank 2 is slow: time passes before compute in ",
        ),
        (
            dataclasses.replace(REAL, injections=(SlowWarp(DELAY_NS, rank=2, warp=7),)),
            of_rank(2),
            "Warp 7 of block 0 of rank 2 ",
        ),
        (
            dataclasses.replace(REAL, injections=(MoreWork(rank=1),)),
            of_rank(1, CauseKind.AMOUNT),
            "Rank 1 has more work: 1.50 x as many ",
        ),
        (
            dataclasses.replace(REAL, injections=(LateHost(100_000, rank=1),), launch_ns=10_000, is_uneven=True),
            of_rank(1, CauseKind.HOST),
            "Rank 1's gaps before kernels are ",
        ),
        (
            Case(Shape.EXCHANGE, 4, 10, (LateHost(100_000, rank=1),), 0.03, has_host_lane=True),
            of_rank(1, CauseKind.HOST),
            "Rank 1's host is late: its gaps before kernels are ",
        ),
        (
            Case(Shape.EXCHANGE, 4, 20, (Latency(DELAY_NS, source=1, destination=3),), 0.02),
            Candidate(CauseKind.LINK, 1, 3),
            "Messages on the link 1 → 3 take 4.98 us longer than on other links.",
        ),
        (
            Case(Shape.EXCHANGE, 4, 10, (Drain(DELAY_NS, source=1, destination=3),), 0.02),
            Candidate(CauseKind.LINK, 1, 3),
            "Messages on the link 1 → 3 take 4.97 us longer than on other links.",
        ),
        (
            Case(Shape.BARRIER, 6, 20, (Latency(20_000, source=1, destination=3),), 0.02),
            Candidate(CauseKind.LINK, 1, 3),
            "Messages on the link 1 → 3 take ",
        ),
        (
            Case(Shape.RING, 6, 24, (ExtraKernel(20_000, rank=4, iterations=tuple(range(1, 24, 4))),), 0.02),
            of_rank(4, CauseKind.EXTRA),
            "Rank 4 alone runs ",
        ),
        (
            Case(Shape.BARRIER, 8, 30, (SlowWork(DELAY_NS, rank=2, iterations=tuple(range(12, 30))),), 0.02),
            of_rank(2),
            "Rank 2 is slow from iteration 12 on: each step.compute ",
        ),
        (
            Case(Shape.BARRIER, 8, 30, (SlowWork(3 * DELAY_NS, rank=2, iterations=tuple(range(1, 30, 4))),), 0.02),
            of_rank(2),
            "Rank 2 is slow in every 4th iteration from 1 on: each step.compute ",
        ),
    ],
    ids=lambda value: f"{value.shape.value}-{type(value.injections[0]).__name__}" if isinstance(value, Case) else "",
)
def test_a_cause_costs_what_the_run_is_longer_with_it(case: Case, wanted: Candidate, said: str, tmp_path: Path):
    truth = simulate(case, 71, tmp_path)
    findings = Findings(tracekern.load(truth.directory))
    assert named(findings.answer) == [wanted]
    (cause,) = findings.answer.causes
    assert cause.saving.whole_ns == pytest.approx(truth.cost_ns, rel=0.05)
    assert cause.within_ns[0] <= truth.cost_ns <= cause.within_ns[1]
    assert cause.saving.by_iteration.sum() == pytest.approx(cause.saving.whole_ns, rel=0.01)
    assert findings.answer.makespan_ns == pytest.approx(truth.makespan_ns, rel=0.001)
    assert headlines(findings)[0].text.startswith(said)


@pytest.mark.parametrize("slow", [(), (SlowWork(DELAY_NS, rank=7),)], ids=["alone", "beside a slow rank"])
def test_rings_that_are_too_small_cost_what_the_run_is_longer_than_with_room(
    slow: tuple[Injection, ...], tmp_path: Path
):
    case = Case(Shape.CREDITS, 8, 40, (SmallRing(slots=1), *slow), noise=0.1, window=0, is_persistent=True)
    truth = simulate(case, 73, tmp_path)
    findings = Findings(tracekern.load(truth.directory))
    (ring,) = (one for one in named(findings.answer) if one.kind is CauseKind.RING)
    assert ring.channel == "room"
    assert set(named(findings.answer)) - {ring} == {of_rank(one.rank) for one in slow}
    assert findings.answer.causes[-1].together_ns == pytest.approx(truth.cost_ns, rel=0.05)
    if not slow:
        assert headlines(findings)[0].text.startswith("The rings of channel room are too small: warps wait for room")


def test_hosts_that_all_run_ahead_alike_are_not_accused(tmp_path: Path):
    """Rank 0 waits for nobody: its kernels are shorter, and the gaps before them longer."""
    ahead = {"hosts_run_ahead": True, "has_host_lane": True, "launch_ns": 28_000}
    found = findings_of(Case(Shape.STREAM, 8, 20, noise=0.02, **ahead), 75, tmp_path)
    assert found.answer.even_hosts_ns > 0.1 * found.answer.makespan_ns  # by their gaps they would be
    assert named(found.answer) == []


def test_a_ring_is_not_to_blame_for_a_receiver_that_is_slow(tmp_path: Path):
    found = findings_of(Case(Shape.CREDITS, 4, 40, (SlowWork(DELAY_NS, rank=3),), 0.02, window=4), 74, tmp_path)
    assert named(found.answer) == [of_rank(3)]
    assert found.full_rings


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (
            Case(Shape.EXCHANGE, 6, 10, (LateHost(100_000, rank=1), LateHost(50_000, rank=2)), 0.05),
            {of_rank(1, CauseKind.HOST), of_rank(2, CauseKind.HOST)},
        ),
        (Case(Shape.BARRIER, 8, 20, (SLOW, SlowWork(DELAY_NS, rank=5)), 0.05), {of_rank(2), of_rank(5)}),
        (
            Case(Shape.EXCHANGE, 4, 20, (Drain(10_000, source=1, destination=3), SlowWork(DELAY_NS, rank=0)), 0.02),
            {Candidate(CauseKind.LINK, 1, 3), of_rank(0)},
        ),
        (
            Case(Shape.EXCHANGE, 4, 20, (Latency(20_000, source=1, destination=3), SlowWork(DELAY_NS, rank=3)), 0.02),
            {Candidate(CauseKind.LINK, 1, 3), of_rank(3)},
        ),
    ],
)
def test_causes_that_hide_each_other_are_both_named(case: Case, wanted: set[Candidate], tmp_path: Path):
    truth = simulate(case, 72, tmp_path)
    findings = Findings(tracekern.load(truth.directory))
    assert set(named(findings.answer)) == wanted
    assert findings.answer.causes[-1].together_ns == pytest.approx(truth.cost_ns, rel=0.05)
    if len(findings.answer.causes) > 1:
        assert ": together " in next(line.text for line in headlines(findings) if line.word == "next")


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (Case(Shape.BARRIER, 4, 20, (SlowWork(10_000, rank=2),), 0.02, launch_ns=28_000), of_rank(2)),
        (Case(Shape.BARRIER, 4, 20, (LateHost(20_000, rank=2),), 0.02, launch_ns=28_000), of_rank(2, CauseKind.HOST)),
    ],
)
def test_where_hosts_run_ahead_what_is_saved_lies_between_two_numbers(case: Case, wanted: Candidate, tmp_path: Path):
    """Without what is injected the hosts, which wait for nothing, would launch no faster: the device would idle."""
    case = dataclasses.replace(case, hosts_run_ahead=True, has_host_lane=True)
    truth = simulate(case, 78, tmp_path / "known")
    findings = Findings(tracekern.load(truth.directory))
    assert named(findings.answer) == [wanted]
    (cause,) = findings.answer.causes
    assert cause.saving.whole_ns > 1.1 * truth.cost_ns
    assert cause.at_least_ns == pytest.approx(truth.cost_ns, rel=0.06)
    low, high = duration(cause.at_least_ns), duration(cause.saving.whole_ns)
    assert f"The run would be {low} to {high} (" in headlines(findings)[0].text

    unknown = findings_of(dataclasses.replace(case, has_host_lane=False), 78, tmp_path / "unknown")
    assert [cause.at_least_ns for cause in unknown.answer.causes] == [None]
    assert "The run would be up to " in headlines(unknown)[0].text


def test_clocks_of_hosts_that_are_wrong_leave_an_answer(tmp_path: Path):
    """They may say that a kernel was asked for after it began, or long before the one before it."""
    case = Case(Shape.EXCHANGE, 4, 10, (LateHost(40_000, rank=1),), 0.03, has_host_lane=True, launch_ns=7_000)
    timeline = tracekern.load(simulate(case, 83, tmp_path).directory)
    right = analyze(timeline).answer
    is_host = timeline.tracks_of(TrackKind.HOST) & np.array([track.rank % 2 == 1 for track in timeline.tracks])
    spans, moved = timeline.spans, is_host[timeline.spans.track]
    clocks = [dataclasses.replace(rank.clock, host_hard_ns=300_000.0) for rank in timeline.ranks]
    ranks = [dataclasses.replace(rank, clock=clock) for rank, clock in zip(timeline.ranks, clocks, strict=True)]
    for wrong_ns in (-200_000, 30_000, 200_000):
        shifted = dataclasses.replace(spans, start=spans.start + wrong_ns * moved, end=spans.end + wrong_ns * moved)
        found = analyze(timeline.replace(spans=shifted, ranks=tuple(ranks))).answer
        assert (found.note, named(found)) == ("", named(right))
        assert found.causes[0].saving.whole_ns == right.causes[0].saving.whole_ns >= found.causes[0].at_least_ns


def test_hosts_that_wait_for_the_device_save_one_number(tmp_path: Path):
    case = Case(Shape.EXCHANGE, 4, 10, (LateHost(100_000, rank=1),), 0.03, has_host_lane=True, launch_ns=7_000)
    found = findings_of(case, 79, tmp_path)
    (cause,) = found.answer.causes
    assert cause.at_least_ns == pytest.approx(cause.saving.whole_ns, rel=0.01)
    assert " to " not in headlines(found)[0].text


@pytest.mark.parametrize(
    ("case", "kind", "iterations", "said"),
    [
        (
            Case(Shape.RING, 8, 50, (SlowWork(200_000, rank=2, iterations=(4,)),), 0.05, is_persistent=True),
            CauseKind.PACE,
            (4,),
            "iteration 4: rank 2's slower work",
        ),
        (
            Case(Shape.BARRIER, 8, 50, (SlowWork(100_000, rank=2, iterations=(13, 37)),), 0.03),
            CauseKind.PACE,
            (13, 37),
            "iterations 13 and 37: rank 2's slower work",
        ),
        (
            Case(Shape.EXCHANGE, 4, 11, (LateHost(900_000, rank=2, iterations=(2,)),), 0.02, has_host_lane=True),
            CauseKind.HOST,
            (2,),
            "iteration 2: rank 2's gaps before kernels",
        ),
    ],
)
def test_what_happens_once_has_a_cost_and_a_place_and_names_nobody(case, kind, iterations, said, tmp_path: Path):
    truth = simulate(case, 80, tmp_path)
    findings = Findings(tracekern.load(truth.directory))
    assert named(findings.answer) == []
    (incident,) = findings.answer.incidents
    assert (incident.candidate, incident.iterations) == (of_rank(2, kind), iterations)
    assert incident.saving.whole_ns == pytest.approx(truth.cost_ns, rel=0.05)
    assert headlines(findings)[0].text.lower().startswith(said)


def _ends_with_another_kernel(case: Case, rank: int, warp: int) -> Program:
    yield Launch("persistent", 0, True)
    for iteration in range(case.iterations):
        yield Work("compute", iteration, case.work_ns)
        yield Signal("token", (rank + 1) % case.num_ranks, iteration, iteration)
        yield Wait("token", (rank - 1) % case.num_ranks, iteration, iteration)
    yield Launch("finish", 1, True)
    yield from programs._meeting(case, rank, 0)


def _has_a_checkpoint(case: Case, rank: int, warp: int) -> Program:
    for iteration in range(case.iterations):
        for name, number in [("stage", iteration)] + [("checkpoint", 100)] * (iteration == 4):
            yield Launch(name, number, True)
            yield Work("compute", iteration, case.work_ns)
            yield from programs._meeting(case, rank, number)


@pytest.mark.parametrize(
    ("program", "late_at", "iteration"), [(_ends_with_another_kernel, 1, 7), (_has_a_checkpoint, 100, 5)]
)
def test_a_gap_counts_in_the_iteration_that_it_delays(program, late_at, iteration, monkeypatch, tmp_path: Path):
    monkeypatch.setitem(programs._SHAPES, Shape.RING, program)
    case = Case(Shape.RING, 4, 8, (LateHost(400_000, rank=2, iterations=(late_at,)),), 0.02)
    (incident,) = findings_of(case, 3, tmp_path).answer.incidents
    assert (incident.candidate, incident.iterations) == (of_rank(2, CauseKind.HOST), (iteration,))
    assert incident.saving.by_iteration[iteration] == pytest.approx(400_000, rel=0.01)


def test_repetitions_within_one_call_are_no_iterations(tmp_path: Path):
    """Its barriers repeat in a call, and its tokens in a persistent kernel's iterations; neither is an iteration."""
    call, loop = (Case(Shape.PIPELINE, 4, count, num_warps=4, is_persistent=count > 1) for count in (1, 8))
    assert findings_of(call, 1, tmp_path / "call").answer.num_iterations == 1
    assert findings_of(loop, 1, tmp_path / "loop").answer.num_iterations == 8


def test_an_incident_beside_a_habit_is_told_as_well(tmp_path: Path):
    once, each = LateHost(900_000, rank=1, iterations=(2,)), LateHost(40_000, rank=1)
    found = findings_of(Case(Shape.EXCHANGE, 4, 11, (once, each), 0.02, has_host_lane=True), 80, tmp_path)
    assert named(found.answer) == [of_rank(1, CauseKind.HOST)]
    assert found.answer.causes[0].excess.ns == pytest.approx(40_000, rel=0.02)
    assert "iteration 2: rank 1's gaps" in next(line.text for line in headlines(found) if line.word == "next")


@pytest.mark.parametrize(
    ("injections", "kind", "ranks"),
    [
        (tuple(SlowWork(DELAY_NS, rank=rank) for rank in (1, 4, 6)), CauseKind.PACE, {1, 4, 6}),
        ((LatencyOut(4 * DELAY_NS, ranks=(5,)),), CauseKind.LINKS_OUT, {5}),
    ],
)
def test_a_set_is_one_cause(injections, kind: CauseKind, ranks: set[int], tmp_path: Path):
    case = Case(Shape.EXCHANGE, 8, 12, injections, 0.02)
    truth = simulate(case, 85, tmp_path)
    (cause,) = Findings(tracekern.load(truth.directory)).answer.causes
    assert (cause.candidate.kind, set(cause.candidate.ranks)) == (kind, ranks)
    assert cause.saving.whole_ns == pytest.approx(truth.cost_ns, rel=0.05)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_order_in_which_a_shared_gpu_begins_kernels_is_held_against_nobody(num_ranks, tmp_path: Path):
    turns = tuple(LateHost(8_000 * rank, rank=rank) for rank in range(num_ranks))
    timeline = tracekern.load(simulate(Case(Shape.BARRIER, num_ranks, 12, turns, 0.02), 90, tmp_path).directory)
    last = of_rank(num_ranks - 1, CauseKind.HOST)
    assert last in named(analyze(timeline).answer)
    shared = analyze(on_one_gpu(timeline))
    assert all(cost.candidate.kind is not CauseKind.HOST for cost in (*shared.answer.causes, *shared.answer.costs))
    assert shared.answer.even_hosts_ns == 0
    told = f"ranks 0-{num_ranks - 1} share one GPU: the order in which it begins their kernels"
    assert told in headlines(shared)[-1].text


def test_a_rank_that_begins_far_later_than_the_order_of_a_shared_gpu_explains_is_named(tmp_path: Path):
    late = (*(LateHost(8_000 * rank, rank=rank) for rank in range(4)), LateHost(300_000, rank=1))
    timeline = tracekern.load(simulate(Case(Shape.BARRIER, 4, 12, late, 0.02), 90, tmp_path).directory)
    assert named(analyze(on_one_gpu(timeline)).answer) == [of_rank(1, CauseKind.HOST)]


def on_one_gpu(timeline: Timeline) -> Timeline:
    return timeline.replace(ranks=tuple(dataclasses.replace(rank, clock_id="GPU 1") for rank in timeline.ranks))


def test_half_of_the_ranks_are_told_with_a_cost_and_nobody_is_named(tmp_path: Path):
    slow = tuple(SlowWork(DELAY_NS, rank=rank) for rank in (0, 2, 5, 7))
    case = Case(Shape.BARRIER, 8, 12, slow, 0.02)
    found = findings_of(case, 86, tmp_path)
    assert (named(found.answer), found.answer.silence) == ([], Silence.HALF)
    assert set(found.answer.halves[0].candidate.ranks) == {0, 2, 5, 7}
    assert "4 of 8 ranks (0, 2, 5, 7) differ from the others by their slower work" in headlines(found)[0].text


def test_one_rank_that_is_faster_than_all_others_names_nobody(tmp_path: Path):
    slower = tuple(SlowWork(10_000, rank=rank) for rank in range(8) if rank != 4)
    for shape in (Shape.BARRIER, Shape.EXCHANGE):
        found = findings_of(Case(shape, 8, 10, slower, 0.02), 81, tmp_path / shape.value)
        assert found.answer.silence is Silence.ALIKE


def test_uneven_tokens_name_nobody_and_one_rank_that_has_more_is_told_so(tmp_path: Path):
    uneven = dataclasses.replace(REAL, is_uneven=True)
    assert findings_of(uneven, 82, tmp_path / "uneven").answer.silence is Silence.ALIKE
    more = findings_of(dataclasses.replace(uneven, injections=(MoreWork(rank=1),)), 82, tmp_path / "more")
    assert named(more.answer) == [of_rank(1, CauseKind.AMOUNT)]
    assert headlines(more)[0].text.startswith("Rank 1 has more work: 1.4")


def test_noise_alone_names_nobody(tmp_path: Path):
    found = findings_of(Case(Shape.EXCHANGE, 4, 10, noise=0.06), 73, tmp_path)
    assert (named(found.answer), found.answer.silence) == ([], Silence.ALIKE)
    assert headlines(found)[0].text.startswith("No cause is named: over 10 iterations, no rank and no link takes")


def test_a_clock_that_jumps_names_nobody(tmp_path: Path):
    for jump_ns in (300, 3_000):
        case = Case(Shape.EXCHANGE, 4, 20, noise=0.03, jump_ns=jump_ns)
        assert named(findings_of(case, 74, tmp_path / str(jump_ns)).answer) == []


def test_work_that_moves_from_rank_to_rank_names_nobody(tmp_path: Path):
    case = Case(Shape.RING, 4, 20, (MovingWork(10_000, num_ranks=4),), noise=0.03)
    assert findings_of(case, 77, tmp_path).answer.silence is Silence.ALIKE


@pytest.mark.parametrize(
    ("case", "silence", "said"),
    [
        (
            Case(Shape.RING, 6, 2, (SLOW,), 0.03),
            Silence.FEW_ITERATIONS,
            "2 iterations on record are too few to judge",
        ),
        (Case(Shape.RING, 6, 15, (SLOW,), backend="cpu"), Silence.CPU, "the CPU backend shows order and coverage"),
    ],
)
def test_costs_are_known_where_nobody_is_named(case: Case, silence: Silence, said: str, tmp_path: Path):
    found = findings_of(case, 75, tmp_path)
    assert (named(found.answer), found.answer.silence) == ([], silence)
    assert found.answer.costs[0].candidate == of_rank(2)
    lines = {line.word: line.text for line in headlines(found)}
    assert lines["verdict"].startswith(f"No cause is named: {said}")
    assert lines["why"].startswith("the largest cost is rank 2's slower work: ")
    assert "CPU backend" not in lines["trust"], "the verdict has said it"


def injected(*injections: Injection) -> Case:
    return Case(Shape.RING, 4, 10, injections, 0.02)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda timeline: timeline.replace(aligned=False), "the ranks' clocks are not aligned"),
        (lambda timeline: select(timeline, ranks=[0, 1, 2]), "1 of 4 ranks left out: 3, and what"),
        (
            lambda timeline: timeline.replace(problems=(Problem("error", "missing_rank", 3, -1, "no dump of rank 3"),)),
            "no dump of rank 3, and what is not here may have been waited for",
        ),
        (
            lambda timeline: timeline.replace(
                launches=(dataclasses.replace(timeline.launches[0], records_lost=1), *timeline.launches[1:])
            ),
            "records are missing",
        ),
        (
            lambda timeline: timeline.replace(flows=Flows()),
            "the signals that ended ",
        ),
    ],
)
def test_where_the_record_does_not_say_what_a_cause_costs_the_reason_is_given(spoil, said: str, tmp_path: Path):
    whole = tracekern.load(simulate(injected(SLOW), 76, tmp_path).directory)
    findings = analyze(spoil(whole))
    assert (findings.answer.causes, findings.answer.costs, findings.answer.silence) == ((), (), Silence.NO_COST)
    assert said in findings.answer.note
    assert findings.answer.note in headlines(findings)[0].text
    assert "why" not in {line.word for line in headlines(findings)}


def test_without_waits_for_warps_of_the_block_nobody_is_named_and_waits_for_ranks_are_as_they_were(tmp_path: Path):
    """A warp that holds up those of its block alone, in a persistent kernel, would be passed over."""
    slow = dataclasses.replace(REAL, injections=(SlowWarp(DELAY_NS, rank=2, warp=7),), is_persistent=True)
    work, peers = (findings_of(dataclasses.replace(slow, detail=how), 71, tmp_path / how) for how in ("work", "peers"))
    assert (named(work.answer), named(peers.answer)) == ([of_rank(2)], [])
    told = {line.word: line.text for line in headlines(peers)}
    assert told["verdict"].startswith("No cause is named: ")
    assert "wait_block are not on record (detail peers)" in told["verdict"]
    assert "; left out: wait_block of all warps" in told["waiting"]
    of_ranks = np.isin(work.waits.row, work.timeline.rows_of("wait_block"), invert=True)
    for name in ("peer", "late_ns", "wait_ns"):
        assert getattr(work.waits, name)[of_ranks].tolist() == getattr(peers.waits, name).tolist()


def test_a_window_has_no_cost():
    timeline = tracekern.load(TRACES / "h200x4_late_host")
    last = int(timeline.spans.end.max())
    found = analyze(timeline, window=(last // 2, last))
    assert "not of a window" in found.answer.note
    lines = {line.word: line.text for line in headlines(found)}
    assert lines["part"] == f"all numbers are of the window from {duration(last // 2)} to {duration(last)}"
    assert "part" not in lines_of(timeline)


def test_clocks_that_contradict_messages_make_a_verdict_doubtful_and_name_no_link():
    """Rank 1's clock is off by far more than its bound allows, or its kernels signal for another call."""
    for wrong_ns in (-40_000, 40_000):
        seen = with_clocks(exchange(late={2: 50_000}, num_launches=10).timeline(hard_ns=600), 600, 100, {1: wrong_ns})
        findings = analyze(seen.replace(problems=join_flows(seen)[1]))
        assert findings.is_contradicted
        assert named(findings.answer) == [of_rank(2)]
        assert all(cost.candidate.kind is not CauseKind.LINK for cost in findings.answer.costs)
        lines = {line.word: line.text for line in headlines(findings)}
        assert "; doubtful, as waits ended before their signals began" in lines["why"]
        assert lines["trust"].startswith("channel ")
