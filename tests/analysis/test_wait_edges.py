"""Who came last at a barrier, where a flight recorder overwrote the older records, or a rank is missing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scenarios import NUMBER, Scenario

from tests.pairs import end_bits_of, pairs_of
from tests.paths import TRACES
from tracekern.analysis.doubt import charge_ranks, most_charged, name_worst
from tracekern.analysis.waits.analyze import WaitKind, analyze_waits
from tracekern.analysis.waits.edges import local_barriers
from tracekern.dump import format as fmt
from tracekern.dump.reader import Dump, read_dump
from tracekern.timeline.decode.decoder import decode
from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.model import Channel, ChannelKind, EventClass, EventType, Field, Timeline
from tracekern.timeline.select import select, take_spans


def keep_last(dump: Dump, count: int) -> Dump:
    """The dump as a flight recorder with that much room a track would have left it."""
    headers, records = [], []
    for launch in dump.launches:
        of_tracks = dump.track_headers(launch).copy()
        rows = dump.payload[launch.records_offset :][: launch.records_count * fmt.RECORD_BYTES]
        spans = np.split(rows.view(fmt.SPAN_RECORD), np.cumsum(of_tracks["written"])[:-1])
        shift, bits = dump.metadata["clock"]["shift"], end_bits_of(dump.metadata["event_tables"][launch.event_table])
        tracks = [
            pairs_of(track, int(start), shift, bits)
            for track, start in zip(spans, of_tracks["start_ticks"], strict=True)
        ]
        of_tracks["attempted"] = [len(track) for track in tracks]
        of_tracks["written"] = np.minimum(of_tracks["attempted"], count)
        of_tracks["started"] = fmt.STARTED_RING
        headers.append(of_tracks.tobytes())
        records.append(b"".join(track[-count:].tobytes() for track in tracks))
    before = dump.payload[: dump.launches[0].records_offset].tobytes()  # clock samples and host spans
    sections = [section.ljust(fmt.align_up(len(section)), b"\0") for section in headers + records]
    offsets = np.cumsum([len(before), *map(len, sections)]).tolist()
    launches = tuple(
        dataclasses.replace(
            launch,
            headers_offset=offsets[idx],
            records_offset=offsets[len(headers) + idx],
            records_count=len(records[idx]) // fmt.RECORD_BYTES,
        )
        for idx, launch in enumerate(dump.launches)
    )
    payload = np.frombuffer(b"".join([before, *sections]), np.uint8)
    return dataclasses.replace(dump, launches=launches, payload=payload, headers=payload)


def last_ones(timeline: Timeline) -> dict[tuple[str, int], tuple[str, int]]:
    """(track, end) of a wait -> (track, end) of the wait of the warp that came last."""
    spans, found = timeline.spans, local_barriers(timeline)
    ends = [
        [(timeline.tracks[spans.track[row]].name, int(spans.end[row])) for row in rows]
        for rows in (found.wait, found.last)
    ]
    return dict(zip(*ends, strict=True))


@pytest.mark.parametrize(("count", "num_unknown"), [(4, 12), (5, 24), (8, 64), (10, 8), (13, 0), (64, 0)])
def test_a_flight_recorder_names_the_same_last_warps_or_none(count: int, num_unknown: int):
    """Nobody where a warp's wait was overwritten, or the begin of that which seems to have come last."""
    whole = read_dump(TRACES / "h200x4" / "rank_00000.tkdump")
    kept = decode(keep_last(whole, count))
    truth, found = last_ones(decode(whole)), last_ones(kept)
    assert found.items() <= truth.items()
    at_barriers = np.array([event.name in ("wait_block", "wait_grid") for event in kept.events])
    assert len(found) == np.count_nonzero(at_barriers[kept.spans.event]) - num_unknown


def test_nobody_was_last_where_the_wait_of_one_warp_was_lost():
    run = Scenario(1, num_warps=3)
    run.launch("combine")
    for warp in run.warps:
        run.work(0, 1000 * (1 + warp), warp)
    run.meet_block(0)
    timeline = run.timeline()
    launches = tuple(dataclasses.replace(launch, records_lost=1) for launch in timeline.launches)
    for warp, found in ((None, 3), (0, 0), (2, 0)):
        tracks = [idx for idx, track in enumerate(timeline.tracks) if track.warp == warp]
        is_lost = (timeline.spans.event == NUMBER["wait_block"]) & np.isin(timeline.spans.track, tracks)
        assert len(local_barriers(take_spans(timeline.replace(launches=launches), ~is_lost)).wait) == found


def test_a_span_without_its_begin_is_no_short_one():
    whole = read_dump(TRACES / "h200x4_late_host" / "rank_00000.tkdump")
    for dump in (whole, keep_last(whole, 5)):
        assert "dense_probes" not in {problem.kind for problem in decode(dump).problems}


def meetings_with_a_late_rank() -> Timeline:
    """Four launches in which rank 1 comes 9 us late to a barrier of all ranks."""
    run = Scenario(4)
    for number in range(4):
        run.launch("dispatch", at=(1 + number) * 1_000_000)
        for rank in run.ranks:
            run.work(rank, 9000 if rank == 1 else 300 * rank)
        run.meet()
    return run.timeline()


def without_arrivals(timeline: Timeline, rank: int) -> Timeline:
    """As a flight recorder would have left it that overwrote all that this rank told."""
    is_lost = (timeline.spans.event == NUMBER["signal_meeting"]) & (
        timeline.track_ranks()[timeline.spans.track] == rank
    )
    launches = tuple(
        dataclasses.replace(launch, records_overwritten=9 * (launch.rank == rank)) for launch in timeline.launches
    )
    return take_spans(timeline, ~is_lost).replace(launches=launches)


def test_nobody_was_last_at_a_barrier_where_the_arrival_of_a_rank_was_overwritten():
    timeline = meetings_with_a_late_rank()
    assert name_worst(most_charged(charge_ranks(timeline, analyze_waits(timeline)))).rank == 1
    for lost, worst in ((1, None), (3, 1)):  # rank 3 has heard all others itself
        seen = without_arrivals(timeline, lost)
        waits = analyze_waits(seen.replace(flows=join_flows(seen)[0]))
        of_others = waits.rank != lost
        assert (waits.kind[of_others] == WaitKind.UNMATCHED).all()
        assert name_worst(most_charged(charge_ranks(seen, waits))).rank == worst


def test_nobody_was_last_at_a_barrier_of_ranks_that_are_not_in_the_capture():
    timeline = meetings_with_a_late_rank()
    ranks = tuple(dataclasses.replace(rank, metadata={"num_ranks": 4}) for rank in timeline.ranks)
    seen = select(timeline.replace(ranks=ranks), ranks=[0, 2, 3])
    waits = analyze_waits(seen)
    assert (waits.kind == WaitKind.UNMATCHED).all()
    assert name_worst(most_charged(charge_ranks(seen, waits))).rank is None
    everybody = select(timeline.replace(ranks=ranks), ranks=[0, 1, 2, 3])
    assert (analyze_waits(everybody).kind == WaitKind.BARRIER).all()


def meeting_in_pairs(kind: ChannelKind, fields: tuple[Field, ...]) -> Timeline:
    """Four warps of a block, of which 0 and 1 meet at barrier 1, 2 and 3 at barrier 2; each comes 1 us after the last.

    fields: of the wait, "barrier" and maybe "warps".
    """
    run = Scenario(1, num_warps=4)
    run.launch("combine")
    for warp in run.warps:
        run.work(0, 1000 * (1 + warp), warp)
    run.meet_block(0)
    timeline = run.timeline()
    meets = timeline.spans.event == NUMBER["wait_block"]
    warp = np.array([track.warp for track in timeline.tracks])[timeline.spans.track]
    values = {"barrier": 1 + warp // 2, "warps": np.full(len(warp), 2)}
    payload = sum(values[field.name] << shift for field, shift in zip(fields, (0, 4), strict=False))
    event = EventType(
        "wait_pair", EventClass.WAIT, "completion", Channel("pair", kind, ("barrier",)), begin_fields=fields
    )
    events = [event if idx == NUMBER["wait_block"] else one for idx, one in enumerate(timeline.events)]
    begin = np.where(meets, payload, 0).astype(np.uint64)
    end = np.where(meets & (warp < 2), timeline.spans.end - 1500, timeline.spans.end)  # they wait for nobody else
    return timeline.replace(
        events=tuple(events), spans=dataclasses.replace(timeline.spans, begin_payload=begin, end=end)
    )


@pytest.mark.parametrize("kind", [ChannelKind.GROUP, ChannelKind.GRID])
def test_warps_that_meet_at_a_named_barrier_wait_for_the_last_of_them(kind: ChannelKind):
    timeline = meeting_in_pairs(kind, (Field("barrier", 4),))
    warp = [timeline.tracks[track].warp for track in timeline.spans.track.tolist()]
    found = local_barriers(timeline)
    assert {warp[wait]: warp[last] for wait, last in zip(found.wait, found.last, strict=True)} == {
        0: 1,
        1: 1,
        2: 3,
        3: 3,
    }
    assert join_flows(timeline)[1] == (), "nobody signals there"
    waits = analyze_waits(timeline)
    assert (waits.kind == WaitKind.BARRIER).all()
    assert waits.late_ns.tolist() == [1000, 0, 1000, 0]


def test_how_many_meet_at_a_named_barrier_says_whether_one_is_missing():
    barrier, warps = Field("barrier", 4), Field("warps", 6)
    for fields, num_known in (((barrier,), 0), ((barrier, warps), 2)):
        timeline = meeting_in_pairs(ChannelKind.GROUP, fields)
        launches = tuple(dataclasses.replace(launch, records_lost=1) for launch in timeline.launches)
        is_lost = np.array([track.warp for track in timeline.tracks])[timeline.spans.track] == 1
        seen = take_spans(timeline.replace(launches=launches), ~is_lost)
        assert len(local_barriers(seen).wait) == num_known
