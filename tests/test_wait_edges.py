"""Who came last at block and grid barriers, where a flight recorder overwrote the older records."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tracekern.analysis.wait_edges import local_barriers
from tracekern.record import format as fmt
from tracekern.record.dump import Dump, read_dump
from tracekern.timeline.decode import decode
from tracekern.timeline.model import Timeline

TRACES = Path(__file__).resolve().parent.parent / "traces"


def keep_last(dump: Dump, count: int) -> Dump:
    """The dump as a flight recorder with that much room a track would have left it."""
    headers, records = [], []
    for launch in dump.launches:
        of_tracks = dump.track_headers(launch).copy()
        rows = dump.payload[launch.records_offset :][: launch.records_count * fmt.WIDE_RECORD.itemsize]
        tracks = np.split(rows.view(fmt.WIDE_RECORD), np.cumsum(of_tracks["written"])[:-1])
        of_tracks["written"] = np.minimum(of_tracks["written"], count)
        of_tracks["started"] = fmt.STARTED_RING
        headers.append(of_tracks.tobytes())
        records.append(b"".join(track[-count:].tobytes() for track in tracks))
    before = dump.payload[: dump.launches[0].headers_offset].tobytes()  # clock samples and host spans
    sections = [section.ljust(fmt.align_up(len(section)), b"\0") for section in headers + records]
    offsets = np.cumsum([len(before), *map(len, sections)]).tolist()
    launches = tuple(
        dataclasses.replace(
            launch,
            headers_offset=offsets[idx],
            records_offset=offsets[len(headers) + idx],
            records_count=len(records[idx]) // fmt.WIDE_RECORD.itemsize,
        )
        for idx, launch in enumerate(dump.launches)
    )
    return dataclasses.replace(dump, launches=launches, payload=np.frombuffer(b"".join([before, *sections]), np.uint8))


def last_ones(timeline: Timeline) -> dict[tuple[str, int], tuple[str, int]]:
    """(track, end) of a wait -> (track, end) of the wait of the warp that came last."""
    spans, found = timeline.spans, local_barriers(timeline)
    ends = [
        [(timeline.tracks[spans.track[row]].name, int(spans.end[row])) for row in rows]
        for rows in (found.wait, found.last)
    ]
    return dict(zip(*ends, strict=True))


@pytest.mark.parametrize("count", [5, 8, 64])
def test_a_flight_recorder_names_the_same_last_warps_or_none(count: int):
    whole = read_dump(TRACES / "h200x4" / "rank_00000.tkdump")
    truth, found = last_ones(decode(whole)), last_ones(decode(keep_last(whole, count)))
    assert found
    assert found.items() <= truth.items()


def test_a_span_without_its_begin_is_no_short_one():
    whole = read_dump(TRACES / "h200x4_late_host" / "rank_00000.tkdump")
    for dump in (whole, keep_last(whole, 5)):
        assert "dense_probes" not in {problem.kind for problem in decode(dump).problems}
