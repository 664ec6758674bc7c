"""The pipelined variant keeps two partitions under way: seen in the records of the kernel itself."""

from __future__ import annotations

from collections import defaultdict

import pytest

import tracekern
from tests.warm_ranks import run_moe
from tracekern.moe.workload.options import MoeRun
from tracekern.timeline.model import Timeline, field_values

TOKENS, PARTITIONS = 24, 4
SHAPE = {"ranks": 3, "tokens": TOKENS, "hidden": 64, "experts": 12, "topk": 3, "uneven": False, "routing": "uniform"}
Step = tuple[int, int, int]
"""(partition, start, end)."""


def steps_of_tracks(timeline: Timeline) -> dict[tuple[int, int], dict[str, list[Step]]]:
    """(track, launch) -> event -> its spans, for events whose slot or token names the partition."""
    partition_tokens = TOKENS // PARTITIONS
    field_of = {"copy_row": "slot", "wait_partial": "slot", "reduce_token": "token", "send_partial": "slot"}
    field_of["wait_row"] = "slot"  # told at its end
    steps: dict[tuple[int, int], dict[str, list[Step]]] = defaultdict(lambda: defaultdict(list))
    spans = timeline.spans
    for index, event in enumerate(spans.event.tolist()):
        kind = timeline.events[event]
        if kind.name in field_of:
            (place,) = field_values(kind, field_of[kind.name], spans, [index])
            step = (int(place) // partition_tokens, int(spans.start[index]), int(spans.end[index]))
            steps[int(spans.track[index]), int(spans.launch[index])][kind.name].append(step)
    return steps


@pytest.mark.parametrize(("blocks", "warps"), [(3, 2), (1, 1)])
def test_a_partition_goes_out_while_the_one_before_comes_back(tmp_path, blocks, warps):
    options = MoeRun(
        **SHAPE,
        variant="pipelined",
        iterations=2,
        blocks=blocks,
        warps=warps,
        family_options={"partitions": PARTITIONS},
    )
    run_moe(options, tmp_path).raise_for_error()
    seen = 0
    for events in steps_of_tracks(tracekern.load(tmp_path)).values():
        for partition, start, _ in events["wait_partial"]:
            # What comes next is on its way before the first look at what comes back, ...
            assert all(end <= start for other, _, end in events["copy_row"] if other <= partition + 1)
            seen += sum(other == partition + 1 for other, _, _ in events["copy_row"])
        for partition, start, _ in events["copy_row"]:
            # ... and no third partition joins them.
            assert all(end <= start for other, _, end in events["reduce_token"] if other <= partition - 2)
            seen += sum(other == partition - 2 for other, _, _ in events["reduce_token"])
        for partition, start, _ in events["wait_row"]:
            assert all(end <= start for other, _, end in events["send_partial"] if other < partition)
    assert seen > 0


def test_one_partition_is_sent_whole_before_anything_comes_back(tmp_path):
    options = MoeRun(**SHAPE, variant="pipelined", iterations=1, family_options={"partitions": 1})
    run_moe(options, tmp_path).raise_for_error()
    for events in steps_of_tracks(tracekern.load(tmp_path)).values():
        for _, start, _ in events["wait_partial"]:
            assert all(end <= start for _, _, end in events["copy_row"])
