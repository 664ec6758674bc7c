"""OTF2 export, read back with the OTF2 library itself."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import expected
import pytest
from hypothesis import HealthCheck, assume, given, settings
from timelines import COPY, make_spans, make_timeline, timelines

from tracekern.errors import BadInput
from tracekern.export import labels
from tracekern.export.otf2 import write_otf2
from tracekern.timeline.merge import load
from tracekern.timeline.model import Flows, Spans, Timeline, TrackKind

TRACES = Path(__file__).parent.parent / "traces"
otf2 = pytest.importorskip("otf2", reason="the PyPI package otf2 is not installed (pip install otf2)")


FULL_DISK = """
import resource, signal, sys
from tracekern.errors import BadInput
from tracekern.export.otf2 import write_otf2
from tracekern.timeline.merge import load
timeline = load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_otf2(timeline, sys.argv[2])
except BadInput as error:
    print(error)
"""


class Loaded:
    """What the library reads: spans by location, and messages put together by their tag."""

    def __init__(self, path: Path, time_shift: int = 0) -> None:
        self.by_location: dict[tuple[str, str], Counter] = {}
        self.messages: list[tuple[int, int]] = []
        """(sent, received) times."""
        self.groups: dict[str, set[str]] = {}
        sent: dict[tuple, int] = {}
        received: dict[tuple, int] = {}
        open_spans: dict[object, list] = {}
        with otf2.reader.open(str(path / "traces.otf2")) as trace:
            comm = next(iter(trace.definitions.comms), None)
            for group in trace.definitions.groups:
                if group.group_type == otf2.GroupType.REGIONS:
                    self.groups[group.name] = {region.name for region in group.members}
            for location, event in trace.events:
                stack = open_spans.setdefault(location, [])
                time = event.time - time_shift
                arguments = {key.name: value for key, value in (event.attributes or {}).items()}
                if isinstance(event, otf2.events.Enter):
                    stack.append((event.region.name, time, arguments))
                elif isinstance(event, otf2.events.Leave):
                    name, start, begin = stack.pop()
                    assert name == event.region.name
                    everything = {**begin, **arguments}
                    if "open" in everything:
                        everything["open"] = bool(everything["open"])
                    place = location.group.name, location.name
                    span = name, start, time - start, tuple(sorted(everything.items()))
                    self.by_location.setdefault(place, Counter())[span] += 1
                elif isinstance(event, otf2.events.MpiSend):
                    sent[location, comm.location(event.receiver), event.msg_tag] = time
                elif isinstance(event, otf2.events.MpiRecv):
                    received[comm.location(event.sender), location, event.msg_tag] = time
        assert all(not stack for stack in open_spans.values())
        assert sent.keys() == received.keys()
        self.messages = sorted((time, received[key]) for key, time in sent.items())


def wanted_messages(timeline: Timeline) -> list[tuple[int, int]]:
    messages = []
    for signal, wait in zip(timeline.flows.signal.tolist(), timeline.flows.wait.tolist(), strict=True):
        signal_end, wait_end = expected.draw_end(timeline, signal), expected.draw_end(timeline, wait)
        start = int(timeline.spans.start[signal])
        if wait_end > start:
            messages.append((start if signal_end >= wait_end else signal_end, wait_end))
    return sorted(messages)


def place(timeline: Timeline, track_idx: int) -> tuple[str, str]:
    """The names of a track's process and location."""
    track = timeline.tracks[track_idx]
    rank = next(rank for rank in timeline.ranks if rank.rank == track.rank)
    return labels.rank_label(rank, 1), labels.flat_label(track, 1)


def check(timeline: Timeline, path: Path) -> Loaded:
    stats = write_otf2(timeline, path)
    times = [*timeline.spans.start.tolist(), *timeline.marks.time.tolist(), 0]
    found = Loaded(path, max(0, -min(times)))
    wanted: dict[tuple[str, str], Counter] = {}
    for track, spans in expected.slices_by_track(timeline).items():
        wanted.setdefault(place(timeline, track), Counter()).update(spans)
    drawn: dict[tuple[str, str], Counter] = {}
    for (process, location), spans in found.by_location.items():
        drawn.setdefault((process, location.split(" (lane ")[0]), Counter()).update(spans)
    assert drawn == wanted
    assert found.messages == wanted_messages(timeline)
    assert (stats.spans, stats.marks) == (len(timeline.spans), len(timeline.marks))
    assert stats.flows == len(found.messages)
    return found


def test_every_span_lies_on_its_location(tmp_path):
    found = check(make_timeline(3), tmp_path / "archive")
    assert found.groups["wait"] == {"wait_token"}
    assert found.groups["launch"] == {"dispatch"}
    assert "Rückwärts → 反向 🚀" in found.groups["host"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_any_timeline_arrives_whole(tmp_path_factory, timeline):
    assume(len(timeline.spans) + len(timeline.marks))
    check(timeline, tmp_path_factory.mktemp("otf2") / "archive")


def test_a_real_capture_arrives_whole(tmp_path):
    check(load(TRACES / "h200x4"), tmp_path / "archive")


def test_spans_that_overlap_in_part_go_to_locations_of_their_own(tmp_path):
    spans = make_spans((2, COPY, 0, start, start + 10, 0, 0) for start in (0, 5, 8, 10))
    found = check(make_timeline(spans=spans, flows=Flows()), tmp_path / "archive")
    names = {location.removeprefix("block 000 warp 00") for _, location in found.by_location}
    assert names == {"", " (lane 2)", " (lane 3)"}


def test_kinds_of_locations(tmp_path):
    timeline = make_timeline(1)
    write_otf2(timeline, tmp_path / "archive")
    with otf2.reader.open(str(tmp_path / "archive" / "traces.otf2")) as trace:
        kinds = {location.name: location.type for location in trace.definitions.locations}
        assert trace.timer_resolution == 10**9
    for track in timeline.tracks:
        host = track.kind == TrackKind.HOST
        wanted = otf2.LocationType.CPU_THREAD if host else otf2.LocationType.ACCELERATOR_STREAM
        assert kinds[labels.flat_label(track, 1)] == wanted


def test_what_exists_is_never_touched(tmp_path):
    (tmp_path / "archive").mkdir()
    with pytest.raises(BadInput, match="exists already"):
        write_otf2(make_timeline(), tmp_path / "archive")
    with pytest.raises(BadInput, match="cannot write .*no-such-folder"):
        write_otf2(make_timeline(), tmp_path / "no-such-folder" / "archive")
    with pytest.raises(BadInput, match="there is no span to write"):
        write_otf2(make_timeline(spans=Spans(), flows=Flows()), tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_without_the_package_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "otf2", None)
    with pytest.raises(BadInput, match="pip install otf2"):
        write_otf2(make_timeline(), tmp_path / "archive")
    assert list(tmp_path.iterdir()) == []


def test_command(command_line, tmp_path):
    result = command_line("export", TRACES / "h200x4", "--otf2", tmp_path / "archive", "--ranks", "0,1")
    assert result.returncode == 0, result.stderr
    assert sum(Loaded(tmp_path / "archive").by_location.values(), Counter()).total() > 1000
    both = command_line("export", TRACES / "h200x4", "--otf2", tmp_path / "b", "-o", tmp_path / "c.json")
    assert (both.returncode, both.stderr) == (2, "tracekern: export: wanted one of -o FILE and --otf2 DIR\n")


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(TRACES / "cpu_8_ranks"), str(tmp_path / "archive")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith(f"cannot write {tmp_path / 'archive'}: "), result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
