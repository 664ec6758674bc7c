"""What a kernel's macros leave in memory, read by a reader of its own: order, payloads, losses, selection, hangs."""

from __future__ import annotations

import json
import struct
import subprocess
from dataclasses import dataclass

import pytest
from toolchains import program

NUM_BLOCKS, NUM_WARPS = 4, 2
NUM_TRACKS = NUM_BLOCKS * NUM_WARPS
HEADER = struct.Struct("<QIHHQIIQI4xII4xHH")
HEADER_BYTES = 64
RECORD_BYTES = 16
BEGIN, END, MARK = 1, 2, 3
PLAIN, FITS, STRADDLES, WAIT_FULL, SIGNAL_SOME, NOTE, STEP = range(7)
BOUNDARY = 7 << 32


@dataclass
class Track:
    start_ticks: int
    sm: int
    started: int
    role: int
    end_ticks: int
    written: int
    attempted: int
    elapsed_cycles: int
    epoch: int
    blocks_run: int
    blocks_generation: int
    warps_run: int
    warps_generation: int
    records: list[tuple[int, int, int, int]]
    """(kind, event, ticks, payload)"""

    def what(self) -> list[tuple[int, int, int]]:
        return [(kind, event, payload) for kind, event, _, payload in self.records]


def read_records(raw: bytes) -> list[tuple[int, int, int, int]]:
    found = []
    for ticks, high, word in struct.iter_unpack("<QII", raw):
        if word & 7 == 0:
            break
        found.append((word & 7, word >> 3 & 63, ticks, high << 23 | word >> 9))
    return found


def record(scenario: str, num_records: int, flags: tuple[str, ...] = (), **selection: int) -> list[Track]:
    """The tracks that a launch of the test kernel left; checks the guards behind headers and records."""
    options = [f"{name}={value}" for name, value in selection.items()]
    command = [program("recorder", "-O1", *flags), scenario, str(num_records), *options]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    headers, records = raw[: HEADER_BYTES * (NUM_TRACKS + 1)], raw[HEADER_BYTES * (NUM_TRACKS + 1) :]
    track_bytes = num_records * RECORD_BYTES
    assert headers[-HEADER_BYTES:] == b"\xa5" * HEADER_BYTES
    assert records[NUM_TRACKS * track_bytes :] == b"\xa5" * RECORD_BYTES
    tracks = []
    for i in range(NUM_TRACKS):
        fields = HEADER.unpack_from(headers, i * HEADER_BYTES)
        region = records[i * track_bytes : (i + 1) * track_bytes]
        tracks.append(Track(*fields, read_records(region)))
    return tracks


def assert_nested(track: Track) -> None:
    """Every begin has its end, in the order of a stack."""
    open_events = []
    for kind, event, _ in track.what():
        if kind == BEGIN:
            open_events.append(event)
        elif kind == END:
            assert open_events.pop() == event
    assert open_events == []


ALL = [
    (BEGIN, FITS, 0x7FFFFF),
    (BEGIN, STRADDLES, 0xFFFFFF),
    (BEGIN, WAIT_FULL, 0x400001),
    (BEGIN, PLAIN, 0),
    (END, PLAIN, 0),
    (END, WAIT_FULL, 0xFFFFFFFE),
    (END, STRADDLES, 0x40000001),
    (BEGIN, PLAIN, 0),
    (END, PLAIN, 0),
    (BEGIN, STEP, 1 << 54 | 5),
    (MARK, NOTE, 0x3FFFFFFF),
    (END, STEP, 0),
    (BEGIN, FITS, 3),
    (END, FITS, 0),
    (BEGIN, SIGNAL_SOME, 0x7FFFFFFE << 23 | 1),
    (END, SIGNAL_SOME, 1),
    (END, FITS, 0),
]


def test_every_macro_and_payload_width():
    for index, track in enumerate(record("all", 64)):
        assert track.what() == ALL
        assert (track.role, track.started) == (index % NUM_WARPS, 1)
        ticks = [track.start_ticks, *(record[2] for record in track.records), track.end_ticks]
        assert ticks == sorted(ticks)
        assert track.written == track.attempted == len(ALL)


def test_tracks_of_a_graph_find_their_descriptor_and_tell_their_epoch():
    for track in record("all", 64, in_graph=1):
        assert track.what() == ALL
        assert track.epoch == 77


def test_a_sequence_ends_and_begins_at_one_tick():
    for track in record("all", 64):
        ticks = [entry[2] for entry in track.records]
        assert ticks[8] == ticks[9]
        assert ticks[11] == ticks[12]


@pytest.mark.parametrize("scenario", ["all", "many"])
def test_a_full_track_stops_counts_and_stays_whole(scenario):
    (wanted,) = {track.attempted for track in record(scenario, 1000)}
    complete = record(scenario, wanted)[0]
    assert complete.written == wanted, "what was attempted is exactly what would have been enough"
    for room in range(wanted):
        for track in record(scenario, room)[:2]:
            assert track.attempted == wanted
            assert track.written <= room
            assert track.end_ticks > track.start_ticks
            assert_nested(track)
            remaining = iter(complete.what())
            assert all(entry in remaining for entry in track.what()), "what is there is in order"


def test_no_room_at_all_only_counts():
    for track in record("many", 0):
        assert (track.written, track.records) == (0, [])
        assert track.end_ticks > track.start_ticks
        assert track.attempted > 100


def test_selected_blocks_are_packed():
    tracks = record("where", 64, block_first=1, block_stop=4, block_step=2)
    wanted = [(1, 0), (1, 1), (3, 0), (3, 1)]  # block and warp
    assert [track.what() for track in tracks[:4]] == [[(MARK, NOTE, 16 * block + warp)] for block, warp in wanted]
    assert all(track.started == 0 and track.records == [] for track in tracks[4:])


def test_warps_that_the_host_was_not_told_of_leave_the_tracks_of_others_alone():
    tracks = record("where", 64, warps_per_block=1)
    assert [track.what() for track in tracks[:NUM_BLOCKS]] == [[(MARK, NOTE, 16 * i)] for i in range(NUM_BLOCKS)]
    assert [track.warps_run for track in tracks[:NUM_BLOCKS]] == [NUM_WARPS] * NUM_BLOCKS
    assert all(track.started == 0 and track.records == [] for track in tracks[NUM_BLOCKS:])
    assert [track.warps_generation for track in tracks] == [0] * NUM_TRACKS
    assert {track.warps_run for track in record("where", 64)} == {0}


def test_blocks_that_the_host_was_not_told_of_say_how_many_ran():
    told = {"num_blocks": 2, "block_first": 1, "block_stop": 2}
    for in_graph in (0, 1):
        tracks = record("where", 64, in_graph=in_graph, **told)
        assert [track.what() for track in tracks[:2]] == [[(MARK, NOTE, 16)], [(MARK, NOTE, 17)]]
        assert [track.blocks_run for track in tracks] == [NUM_BLOCKS] + [0] * (NUM_TRACKS - 1)
        assert all(track.started == 0 and track.records == [] for track in tracks[2:])


@pytest.mark.parametrize("in_graph", [0, 1])
def test_a_track_names_its_generation(in_graph):
    assert {track.started for track in record("where", 64, generation=0xFFFC, in_graph=in_graph)} == {0xFFFD}


@pytest.mark.parametrize("in_graph", [0, 1])
def test_what_the_host_was_not_told_of_names_its_generation(in_graph):
    told = {"num_blocks": 2, "block_stop": 2, "warps_per_block": 1}
    first, *others = record("where", 64, generation=0xFFFC, in_graph=in_graph, **told)
    assert (first.blocks_run, first.blocks_generation) == (NUM_BLOCKS, 0xFFFC)
    assert (first.warps_run, first.warps_generation) == (NUM_WARPS, 0xFFFC)
    assert [(track.warps_run, track.warps_generation) for track in others[:2]] == [(NUM_WARPS, 0xFFFC), (0, 0)]
    assert {(track.blocks_run, track.blocks_generation) for track in others} == {(0, 0)}


def test_of_blocks_that_are_not_selected_nothing_is_said():
    assert {track.blocks_run for track in record("where", 64, block_first=1, block_stop=2)} == {0}
    no_track = record("where", 64, num_blocks=0, block_stop=0)
    assert {track.blocks_run for track in no_track} == {0}


def test_a_role_that_is_not_selected_leaves_its_track_untouched():
    tracks = record("all", 64, role_mask=2)
    for track in tracks:
        selected = track.role == 1
        assert bool(track.started) == selected
        assert track.what() == (ALL if selected else [])
    assert sum(track.started for track in tracks) == NUM_BLOCKS


def test_a_role_beyond_the_32_that_there_can_be_is_on_record_to_be_told_of():
    undefined = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
    tracks = record("all", 64, undefined, first_role=31, role_mask=1)
    assert [track.role for track in tracks if track.started] == [32] * NUM_BLOCKS


def test_only_selected_events_are_recorded_and_counted():
    mask = 1 << STRADDLES | 1 << NOTE
    tracks = record("all", 64, event_mask=mask)
    for track in tracks:
        assert track.what() == [entry for entry in ALL if mask >> entry[1] & 1]
        assert track.attempted == track.written == 3


def test_the_clock_is_64_bits_wide_for_the_reader():
    track = record("cross", 64)[0]
    assert track.start_ticks < BOUNDARY <= track.end_ticks
    by_payload = {payload: ticks for kind, _, ticks, payload in track.records if kind == MARK}
    assert all((ticks >= BOUNDARY) == (payload >= 10) for payload, ticks in by_payload.items())
    assert sorted(by_payload) == [0, 1, 2, 10, 11, 12]
    assert max(by_payload.values()) < BOUNDARY + 60_000_000_000
    assert track.written == len(track.records)
    assert_nested(track)


def test_a_hang_leaves_its_begins_readable():
    track = record("hang", 64)[0]
    assert track.what() == [(BEGIN, FITS, 9), (MARK, NOTE, 1), (BEGIN, WAIT_FULL, 5)]
    assert (track.started, track.end_ticks) == (1, 0)


def test_the_table_describes_itself():
    done = subprocess.run([program("recorder", "-O1"), "describe"], capture_output=True, check=True)
    table = json.loads(done.stdout)
    assert table["name"] == "TestEvent"
    assert [event["name"] for event in table["events"]][WAIT_FULL] == "wait_full"
    assert table["events"][WAIT_FULL] == {
        "name": "wait_full",
        "class": "wait",
        "ends_at": "completion",
        "channel": "data data a",
        "begin_fields": "a:23",
        "end_fields": "c:32",
    }
