"""Lateness and link of every piece of a wait, against a count of nanoseconds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios import EVENTS, Scenario, rows_of
from wait_oracle import any_runs

from tracekern.analysis.waits.analyze import WaitKind, analyze_waits
from tracekern.analysis.waits.event_graph import build_graph
from tracekern.analysis.waits.pieces import parts_of_pieces
from tracekern.timeline.model import OPEN_END, Flows, Timeline


def assert_divided(timeline: Timeline, every: int = 1) -> None:
    """every: of the waits one in so many, as in a window."""
    graph = build_graph(timeline)
    waits = analyze_waits(timeline)
    waits = waits.take(np.arange(0, len(waits), every))
    place = {row: number for number, row in enumerate(waits.row.tolist())}
    wanted = np.zeros((2, len(graph.activity)), np.int64)
    columns = (graph.activity.span, graph.activity.start, graph.activity.end)
    for piece, (span, start, end) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        wait = place.get(span)
        if wait is None:
            continue
        there = int(timeline.spans.start[span] + waits.late_ns[wait])
        late = sum(time < there for time in range(start, end))
        is_message = waits.kind[wait] in (WaitKind.DATA, WaitKind.CREDIT)
        wanted[:, piece] = late, end - start - late if is_message else 0
    asked = np.arange(len(graph.activity))[::-1]
    np.testing.assert_array_equal(parts_of_pieces(timeline, graph, waits, asked), wanted[:, ::-1])


@settings(max_examples=100, deadline=None)
@given(any_runs(), st.integers(1, 3))
def test_of_any_spans(timeline: Timeline, every: int):
    assert_divided(timeline, every)


def every_kind_of_wait() -> Timeline:
    run = Scenario(2, num_warps=2)
    for call in (1, 2):
        run.launch("dispatch")
        for rank in run.ranks:
            run.work(rank, 300 * (rank + call))
            run.pause(rank, 70, warp=1)
            run.grant(rank, 1 - rank, value=call, warp=1)
        for rank in run.ranks:
            run.wait_room(rank, 1 - rank, wanted=call)
            run.signal(rank, 1 - rank, ns=900)
        for rank in run.ranks:
            run.wait(rank, 1 - rank, warp=1)
            run.wait_other(rank, 250, warp=1)
            run.meet_block(rank)
        run.meet()
    return run.timeline()


@pytest.mark.parametrize("every", [1, 2])
def test_of_spans_of_which_none_encloses_another(every: int):
    timeline = every_kind_of_wait()
    assert build_graph(timeline).activity.is_flat
    assert_divided(timeline, every)


@pytest.mark.parametrize(
    "event", [event.name for event in EVENTS[:-1] if event.name not in ("receive_token", "wait_grid")]
)
def test_of_a_span_that_was_given_up_and_holds_all_that_follows(event: str):
    timeline = every_kind_of_wait()
    end = timeline.spans.end.copy()
    end[rows_of(timeline, event)[0]] = OPEN_END
    flows = timeline.flows
    closed = end[flows.wait] != OPEN_END
    assert_divided(
        timeline.replace(
            spans=dataclasses.replace(timeline.spans, end=end), flows=Flows(flows.signal[closed], flows.wait[closed])
        )
    )
