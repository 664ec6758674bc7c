"""What a capture is told of a kernel beside its records: groups, launch shape, bytes and settings, in every format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch
from rank_pool import RankPool
from trace_processor import TraceProcessor

import tracekern
from tracekern.comm.ranks.group import Group
from tracekern.compiled import compiled
from tracekern.errors import BadInput
from tracekern.export.formats.chrome import write_chrome
from tracekern.export.formats.parquet import write_parquet
from tracekern.export.formats.perfetto import write_perfetto
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency import Buffer
from tracekern.moe.low_latency.settings import FACTS
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.workload.options import MoeRun
from tracekern.timeline.model import OPEN_END, EventClass, Timeline, TrackKind, field_values

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 2, 6, 256, 8, 3
NUM_LOCAL, MESSAGE, ROW = EXPERTS // RANKS, FACTS.message_bytes(HIDDEN, True), 2 * HIDDEN
BYTES = {"cast_token": MESSAGE, "send_message": MESSAGE, "copy_token": MESSAGE}
BYTES_OF_EACH = {"signal_count": (MESSAGE, "tokens"), "signal_results": (ROW, "tokens"), "send_result": (16, "vectors")}
OF_A_PAIR = {"wait_count", "wait_group", "wait_message", "copy_token", "send_result", "signal_results"}
PERFETTO = """
select s.name, s.dur, extract_arg(arg_set_id, 'debug.responsible_expert_idx'), extract_arg(arg_set_id, 'debug.bytes'),
  extract_arg(arg_set_id, 'debug.gb_per_s'), extract_arg(arg_set_id, 'debug.blocks'),
  extract_arg(arg_set_id, 'debug.warps'), extract_arg(arg_set_id, 'debug.groups')
from slice s where s.category in ('work', 'wait', 'signal', 'launch')"""
Fact = tuple[str, int, int | None, int | None, float | None]
"""Event, duration, responsible_expert_idx, bytes, GB/s."""


def one_call(group: Group, directory: str) -> None:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, group.num_ranks, EXPERTS)
    buffer = Buffer(group, num_rdma_bytes=num_bytes, backend="cpu", num_sms=2, num_max_warp_groups=12)
    shape = MoeShape(group.num_ranks, TOKENS, EXPERTS, TOPK, HIDDEN, "bf16")
    batch = draw_batch(shape, seed=1, rank=group.rank, iteration=0, routing="uniform", uneven=False)
    with tracekern.capture(directory, device=buffer.comm.device, command="decode") as capture:
        _, _, handle, _, _ = buffer.low_latency_dispatch(batch.x, batch.topk_idx, TOKENS, EXPERTS, capture=capture)
        rows = torch.empty((NUM_LOCAL, group.num_ranks * TOKENS, HIDDEN), dtype=torch.bfloat16)
        buffer.apply_experts(handle, draw_experts(shape), rows, capture=capture)
        buffer.low_latency_combine(rows, batch.topk_idx, batch.topk_weights, handle, capture=capture)
    buffer.destroy()


@pytest.fixture(scope="module")
def timeline(pools: Callable[[int], RankPool], tmp_path_factory) -> Timeline:
    directory = tmp_path_factory.mktemp("facts") / "capture"
    pools(RANKS).call(one_call, str(directory))
    return tracekern.load(directory)


def fact(timeline: Timeline, row: int) -> Fact:
    """What a span is to say: of the pair in its fields, or of where its warp is; bytes by its name."""
    spans = timeline.spans
    event, launch = timeline.events[spans.event[row]], timeline.launches[spans.launch[row]]
    track, length = timeline.tracks[spans.track[row]], int(spans.end[row] - spans.start[row])

    def field(name: str) -> int | None:
        values = field_values(event, name, spans, [row])
        return None if values is None else int(values[0])

    group = None
    if event.name in OF_A_PAIR:
        rank = field("peer") if event.has("peer") else field("src_rank")
        group = rank * NUM_LOCAL + field("local_expert")
    elif event.event_class is not EventClass.LAUNCH and launch.name != "scale_experts":
        group = FACTS.responsible_expert_idx(track.block, track.warp, 4, 3)
    num_bytes = BYTES.get(event.name)
    if event.name in BYTES_OF_EACH:
        of_each, counted = BYTES_OF_EACH[event.name]
        num_bytes = of_each * field(counted)
    rate = num_bytes / length if num_bytes and event.event_class is EventClass.WORK and length else None
    return event.name, length, group, num_bytes, rate


def facts(timeline: Timeline) -> list[Fact]:
    assert not (timeline.spans.end == OPEN_END).any()
    return [fact(timeline, row) for row in range(len(timeline.spans))]


def in_order(found: list[Fact]) -> list[tuple]:
    return sorted((one[:4] for one in found), key=str)


def check(found: list[Fact], wanted: list[Fact]) -> None:
    """Rates are rounded to hundredths, and those of equal bytes and durations are equal."""
    assert in_order(found) == in_order(wanted)
    rates = {one[:4]: one[4] for one in wanted}
    for one in found:
        assert rates[one[:4]] == (None if one[4] is None else pytest.approx(one[4], abs=0.0051))


def test_the_spans_of_a_pair_are_those_of_the_group_responsible_for_it(timeline, tmp_path: Path):
    write_perfetto(timeline, tmp_path / "trace.pftrace")
    slices = TraceProcessor(tmp_path / "trace.pftrace").query(PERFETTO)
    check([tuple(one[:5]) for one in slices], facts(timeline))
    assert {one[0] for one in slices} >= OF_A_PAIR | BYTES.keys() | BYTES_OF_EACH.keys()
    shapes = {one[0]: tuple(one[5:]) for one in slices if one[5] is not None}
    assert shapes == {"dispatch": (2, 12, 4), "scale_experts": (2, 12, None), "combine": (2, 12, 4)}


def test_chrome_json_and_parquet_say_the_same(timeline, tmp_path: Path):
    write_chrome(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["cat"] != "about"]
    names = ("responsible_expert_idx", "bytes", "gb_per_s")
    told = [(one["name"], round(one["dur"] * 1e3), *map(one["args"].get, names)) for one in spans]
    check(told, facts(timeline))
    shapes = {one["name"]: [one["args"].get(key) for key in ("blocks", "warps", "groups")] for one in spans}
    assert [shapes["dispatch"], shapes["scale_experts"]] == [[2, 12, 4], [2, 12, None]]
    write_parquet(timeline, tmp_path / "trace.parquet")
    columns = ["name", "duration_ns", "responsible_expert_idx", "bytes"]
    rows = pl.read_parquet(tmp_path / "trace.parquet").select(columns).rows()
    assert in_order(rows) == in_order(facts(timeline))


def test_rows_are_named_by_group_and_sub_warp(timeline, tmp_path: Path):
    write_perfetto(timeline, tmp_path / "trace.pftrace")
    names = {name for (name,) in TraceProcessor(tmp_path / "trace.pftrace").query("select name from track")}
    named = [re.search(r"warp (\d+) group (\d+) sub (\d+) ", name) for name in names if name and "warp " in name]
    assert sorted({tuple(map(int, found.groups())) for found in named}) == [
        (warp, warp // 3, warp % 3) for warp in range(12)
    ]
    on_device = [track for track in timeline.tracks if track.kind is TrackKind.DEVICE]
    assert all((track.group, track.sub_warp) == divmod(track.warp, 3) for track in on_device)


def test_a_pipeline_tells_its_settings_and_what_the_user_says_comes_first(tmp_path: Path):
    shape = MoeShape(1, TOKENS, EXPERTS, TOPK, HIDDEN, "bf16")
    pipeline = P2PPipeline(Group(0, 1), shape, "pipelined", num_blocks=2, warps_per_block=2, partitions=3)
    batch = draw_batch(shape, seed=1, rank=0, iteration=0, routing="uniform", uneven=False)
    call = batch.x, batch.topk_idx, batch.topk_weights, draw_experts(shape)
    own = {"tokens": 5, "model": "ours"}
    with tracekern.capture(tmp_path, device=pipeline.comm.device, settings=own) as capture:
        pipeline(*call, capture=capture)
    sizes = {"tokens": TOKENS, "hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK}
    run = MoeRun(1, "pipelined", **sizes, family_options={"partitions": 3})
    wanted = {name: value for name, value in run.workload.items() if name not in ("routing", "uneven", "seed")}
    timeline = tracekern.load(tmp_path)
    assert timeline.ranks[0].metadata["settings"] == wanted | own
    assert {event.bytes_each for event in timeline.events if event.name in ("copy_row", "send_partial")} == {ROW}


TABLE = json.loads(compiled("low_latency").event_table())


def with_event(**changes: object) -> dict[str, object]:
    return TABLE | {"events": [TABLE["events"][0] | changes]}


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (TABLE | {"groups": "2"}, "groups '2' called '', wanted a whole number below 2^16 and a name"),
        (TABLE | {"groups": 2, "group_field": 3}, "groups '2' called '3'"),
        (TABLE | {"settings": [1]}, "settings '[1]', wanted a dict"),
        (with_event(bytes=-1), "bytes '-1' of '', wanted a whole number, and a field or nothing"),
        (with_event(bytes=16, bytes_of="rows"), "bytes '16' of 'rows', wanted"),
        (with_event(bytes=16, begin_fields="bytes:8"), "has a field bytes, and bytes 16 beside its fields"),
    ],
)
def test_a_table_that_tells_what_cannot_be_is_refused(tmp_path: Path, table, told):
    refused = pytest.raises(BadInput, match="^launch 'k': event table 'LowLatencyEvent'.*" + re.escape(told))
    with tracekern.capture(tmp_path, device="cpu") as capture, refused:
        capture.launch("k", grid=1, warps=2, events=table)
