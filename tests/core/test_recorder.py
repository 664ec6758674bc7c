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
EMPTY, MARK, SPAN = 0, 3, 4
OPEN = -1
PLAIN, FITS, STRADDLES, WAIT_FULL, SIGNAL_SOME, NOTE, STEP, WAIT_BLOCK = range(8)
BOUNDARY = 7 << 32
LEVEL_1, ALL_OF_LEVEL_1 = 1 << 2, 1 << 61 | 1 << 2
"""Parts of TraceChoice."""


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
    records: list[tuple[int, int, int, int, int]]
    """(kind, event, begin, end, payload)"""

    def what(self) -> list[tuple[int, int, int]]:
        return [(kind, event, payload) for kind, event, _, _, payload in self.records]


def read_records(raw: bytes, start_ticks: int) -> list[tuple[int, int, int, int, int]]:
    found = []
    for end, high, begin, word in struct.iter_unpack("<IIII", raw):
        if word == 0:
            found.append((EMPTY, 0, 0, 0, 0))
            continue
        start = start_ticks >> 5
        first = start + (begin - start) % (1 << 32)
        length = (end - begin) % (1 << 32)
        last = OPEN if length == (1 << 32) - 1 else (first + length) << 5
        found.append((word & 7, word >> 3 & 63, first << 5, last, high << 23 | word >> 9))
    while found and found[-1][0] == EMPTY:
        found.pop()
    return found


def record(scenario: str, num_records: int, flags: tuple[str, ...] = (), **selection: int) -> list[Track]:
    """The tracks that a launch of the test kernel left; checks the guards behind headers and records."""
    return run(scenario, num_records, flags, **selection)[1]


def run(scenario: str, num_records: int, flags: tuple[str, ...] = (), **selection: int) -> tuple[int, list[Track]]:
    """The level of the body for whole launches that ran, 0: another body did; and the launch's tracks."""
    options = [f"{name}={value}" for name, value in selection.items()]
    command = [program("recorder", "-O1", *flags), scenario, str(num_records), *options]
    done = subprocess.run(command, capture_output=True, check=True)
    raw = done.stdout
    headers, records = raw[: HEADER_BYTES * (NUM_TRACKS + 1)], raw[HEADER_BYTES * (NUM_TRACKS + 1) :]
    track_bytes = num_records * RECORD_BYTES
    assert headers[-HEADER_BYTES:] == b"\xa5" * HEADER_BYTES
    assert records[NUM_TRACKS * track_bytes :] == b"\xa5" * RECORD_BYTES
    tracks = []
    for i in range(NUM_TRACKS):
        fields = HEADER.unpack_from(headers, i * HEADER_BYTES)
        region = records[i * track_bytes : (i + 1) * track_bytes]
        tracks.append(Track(*fields, read_records(region, fields[0])))
    return int(done.stderr.removeprefix(b"whole ") or 0), tracks


def assert_nested(track: Track) -> None:
    """Records stand in the order of their begins, and no span ends within another."""
    stack: list[int] = []
    last = track.start_ticks
    for _, _, begin, end, _ in track.records:
        assert last <= begin <= end <= track.end_ticks
        last = begin
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1]
        stack.append(end)


ALL = [
    (SPAN, FITS, 0x7FFFFF),
    (SPAN, STRADDLES, 0x40000001 << 24 | 0xFFFFFF),
    (SPAN, WAIT_FULL, 0xFFFFFFFE << 23 | 0x400001),
    (SPAN, PLAIN, 0),
    (SPAN, PLAIN, 0),
    (SPAN, STEP, 1 << 54 | 5),
    (MARK, NOTE, 0x3FFFFFFF),
    (SPAN, FITS, 3),
    (SPAN, SIGNAL_SOME, 1 << 54 | 0x7FFFFFFE << 23 | 1),
]


def test_every_macro_and_payload_width():
    for index, track in enumerate(record("all", 64)):
        assert track.what() == ALL
        assert (track.role, track.started) == (index % NUM_WARPS, 1)
        assert_nested(track)
        assert track.written == track.attempted == len(ALL)


def test_tracks_of_a_graph_find_their_descriptor_and_tell_their_epoch():
    for track in record("all", 64, in_graph=1):
        assert track.what() == ALL
        assert track.epoch == 77


def test_a_sequence_ends_and_begins_at_one_tick():
    for track in record("all", 64):
        _, _, _, _, plain, step, _, fits, _ = track.records
        assert (plain[3], step[3]) == (step[2], fits[2])


RING = [
    (event, payload)
    for slot in range(3)
    for event, payload in ((WAIT_FULL, slot | slot + 5 << 23), (FITS, slot), (SIGNAL_SOME, slot | slot << 23 | 1 << 54))
]


def test_waits_of_a_sequence_end_with_fields_where_the_next_span_begins():
    for track in record("ring", 64):
        assert [(event, payload) for _, event, _, _, payload in track.records] == RING
        begins, ends = zip(*((begin, end) for _, _, begin, end, _ in track.records), strict=True)
        assert ends[:-1] == begins[1:]
        assert_nested(track)


def test_the_same_in_cycles():
    # Two records a span: ticks, payload and event.
    command = [program("recorder", "-O1"), "ring", "64", "cycles=1"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout[HEADER_BYTES * (NUM_TRACKS + 1) :]
    records = list(struct.iter_unpack("<QII", raw[: 2 * len(RING) * RECORD_BYTES]))
    ticks, payloads = ([record[0] for record in records], [high << 23 | word >> 9 for _, high, word in records])
    assert ticks[1:-1:2] == ticks[2::2]
    assert payloads == [value for slot in range(3) for value in (slot, slot + 5, slot, 0, slot | slot << 23, 1)]


def test_a_wait_that_is_not_needed_leaves_nothing():
    for index, track in enumerate(record("needed", 64)):
        barrier = [(SPAN, WAIT_BLOCK, 0)] if index % NUM_WARPS == 0 else []
        asked = (MARK, NOTE, 4)  # each condition was evaluated once
        assert track.what() == [(SPAN, WAIT_FULL, 1 | 1 << 23), (SPAN, WAIT_FULL, 3), *barrier, asked]
        assert [end for _, _, _, end, _ in track.records].index(OPEN) == 1


@pytest.mark.parametrize("scenario", ["all", "many"])
def test_a_full_track_stops_counts_and_stays_whole(scenario):
    (wanted,) = {track.attempted for track in record(scenario, 1000)}
    complete = record(scenario, wanted)[0]
    assert complete.written == wanted, "what was attempted is exactly what would have been enough"
    for room in range(wanted):
        for track in record(scenario, room)[:2]:
            assert track.attempted == wanted
            assert track.written == room
            assert track.end_ticks > track.start_ticks
            assert_nested(track)
            assert track.what() == complete.what()[:room], "the first stay, each whole"


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
        assert track.attempted == track.written == 2


def test_the_clock_is_64_bits_wide_for_the_reader():
    track = record("cross", 64)[0]
    assert track.start_ticks < BOUNDARY <= track.end_ticks
    by_payload = {payload: ticks for kind, _, ticks, _, payload in track.records if kind == MARK}
    assert all((ticks >= BOUNDARY) == (payload >= 10) for payload, ticks in by_payload.items())
    assert sorted(by_payload) == [0, 1, 2, 10, 11, 12]
    assert max(by_payload.values()) < BOUNDARY + 60_000_000_000
    assert track.written == len(track.records)
    assert_nested(track)


def test_a_hang_leaves_the_wait_readable_and_the_place_of_work_empty():
    track = record("hang", 64)[0]
    assert track.what() == [(EMPTY, 0, 0), (MARK, NOTE, 1), (SPAN, WAIT_FULL, 5)]
    assert track.records[2][3] == OPEN
    assert (track.started, track.end_ticks) == (1, 0)


def test_what_is_left_open_on_purpose_is_on_record():
    for track in record("left", 64):
        assert [(event, end, payload) for _, event, _, end, payload in track.records] == [
            (FITS, OPEN, 9),
            (WAIT_FULL, OPEN, 5),
        ]
        assert (track.written, track.attempted) == (2, 2)


BORDER = 0x7_0000_0000


@pytest.mark.parametrize("before", [1, 2, 3, 40, 63, 64, 65, 200])
def test_a_track_at_a_border_of_4_gib_stops_in_front_of_it(before: int):
    """Only the low word of an address is counted up: what comes behind the border has no room, however much comes."""
    tracks = record("marks", 64, records_at=BORDER - before * RECORD_BYTES, count=1000)
    room = min(64, max(before - 3, 0))
    assert [len(track.records) for track in tracks] == [room] + [0] * (NUM_TRACKS - 1)
    assert tracks[0].written == room
    assert tracks[0].attempted == min(1000, max(before - 2, 0))
    assert [payload for *_, payload in tracks[0].records] == list(range(room))


@pytest.mark.soak
def test_attempts_beyond_what_can_be_counted_leave_the_track_as_it_is():
    count = (1 << 28) + 1000
    track = record("marks", 64, records_at=BORDER, count=count)[0]
    assert (track.written, track.attempted) == (64, (1 << 28) - 2)
    assert [payload for *_, payload in track.records] == list(range(64))


def what_is_told(track: Track) -> tuple[object, ...]:
    """All of a track but its times, which records are open, and the epoch, which graphs tell."""
    is_open = [end == OPEN for _, _, _, end, _ in track.records]
    told = (track.started, track.role, track.written, track.attempted, track.blocks_run, track.warps_run)
    return track.what(), is_open, track.end_ticks > 0, told


SURPLUS_BLOCKS = {"num_blocks": 2, "block_stop": 2}


@pytest.mark.parametrize("scenario", ["all", "many", "ring", "needed", "left", "hang", "where"])
@pytest.mark.parametrize("told", [{}, {"warps_per_block": 1}, SURPLUS_BLOCKS], ids=["known", "warps", "blocks"])
def test_the_body_of_whole_launches_leaves_the_same(scenario, told):
    for num_records in (64, 5):
        level, tracks = run(scenario, num_records, whole=1, **told)
        assert level == 3
        assert list(map(what_is_told, tracks)) == list(map(what_is_told, record(scenario, num_records, **told)))
        if scenario != "hang":
            for track in filter(lambda track: track.started, tracks):
                assert track.start_ticks < track.end_ticks
                assert scenario == "left" or num_records == 64 or track.written == min(5, track.attempted)


@pytest.mark.parametrize(
    "selection",
    [
        {"event_mask": 1 << NOTE},
        {"role_mask": 2},
        {"block_first": 1},
        {"block_stop": 3},
        {"block_step": 2},
        {"generation": 4},
        {"in_graph": 1},
        {"records_at": BORDER - 64 * RECORD_BYTES},
    ],
    ids=lambda selection: next(iter(selection)),
)
def test_any_other_launch_runs_the_body_of_all_launches(selection):
    level, tracks = run("all", 64, whole=1, **selection)
    assert level == 0
    assert list(map(what_is_told, tracks)) == list(map(what_is_told, record("all", 64, **selection)))


@pytest.mark.parametrize("scenario", ["all", "ring", "needed", "hang"])
def test_whole_launches_of_level_1_leave_what_selecting_its_events_leaves(scenario):
    coarse = {"event_mask": (1 << 64) - 1 & ~(1 << STEP | 1 << WAIT_BLOCK)}
    level, tracks = run(scenario, 64, whole=1, choice=ALL_OF_LEVEL_1, **coarse)
    assert level == 1
    assert list(map(what_is_told, tracks)) == list(map(what_is_told, record(scenario, 64, **coarse)))
    assert run(scenario, 64, whole=1, choice=LEVEL_1, **coarse)[0] == 0, "some of its events may not be selected"


@pytest.mark.soak
def test_whole_launches_count_as_far_as_an_address_goes():
    level, tracks = run("marks", 64, whole=1, records_at=BORDER, count=(1 << 28) + 1000)
    assert level == 3
    assert (tracks[0].written, tracks[0].attempted) == (64, (1 << 28) - 2)
    assert [payload for *_, payload in tracks[0].records] == list(range(64))


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
        "level": "1",
    }
