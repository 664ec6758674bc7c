"""How fast does a capture become a trace? The encoder against the perfetto package, and whole merges up to 16 M spans.

    python benchmarks/merge.py
    python benchmarks/merge.py --sizes 1 --rounds 3      # a quick look

Nine spans in ten have two arguments and one has one, beside launch and epoch; flows are a tenth of the spans. The
encoder takes a Timeline in memory to bytes on one thread, without gzip; the package's StreamingTraceProtoBuilder writes
packets of the same content, but no `released` instants and no end fields. A merge goes from dumps to .pftrace.gz in a
process of its own: read, decode, align, join, encode, compress. CPU seconds and the machine's load stand beside wall
seconds, because other work touches the latter far more. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import Table, resident_bytes, write_results

from tracekern.export.drawing import prepare
from tracekern.export.formats.perfetto import encode, write_perfetto
from tracekern.timeline.load import load
from tracekern.timeline.model import Flows, Timeline

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from captures import CaptureSpec, write_capture  # noqa: E402

MIN_ENCODER_SPANS_PER_S = 5e6
MIN_RATIO = 50
MIN_MERGE_SPANS_PER_S = 1e6
MAX_BYTES_PER_SPAN = 250
MAX_GROWTH = 1.5  # seconds per span of the largest merge, in those of the smallest
PACKAGE_SPANS = 20_000
MERGE_SPANS = 4_000_000  # the size that speed and memory are judged at

Measured = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 2, 4, 8, 16], help="merges, in M spans")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--merge", nargs=2, metavar=("CAPTURE", "TRACE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.merge:
        merge_once(*arguments.merge)
        return
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        encoders = measure_encoders(Path(directory), arguments.rounds)
        merges = [measure_merge(Path(directory), round(size * 1e6), arguments.rounds) for size in arguments.sizes]
    verdicts = judge(encoders, merges)
    print_tables(encoders, merges, verdicts)
    results = {"load_before": load_before, "encoders": encoders, "merges": merges, "verdicts": verdicts}
    write_results("merge", results)
    sys.exit(0 if all(verdict["met"] for verdict in verdicts) else 1)


def make_capture(directory: Path, num_spans: int) -> Path:
    """A capture of 8 ranks with about `num_spans` spans; a tenth of them are signals, a tenth waits."""
    spec = CaptureSpec(num_ranks=8, num_blocks=25, warps_per_block=4, groups=max(1, num_spans // 8000))
    return write_capture(directory / f"capture_{num_spans}", spec)


def measure_encoders(directory: Path, rounds: int) -> dict[str, Measured]:
    """Both encoders in turns, so that a noisy machine hits both alike."""
    timeline = load(make_capture(directory, 1_000_000))
    small = timeline.replace(
        spans=timeline.spans.take(slice(0, PACKAGE_SPANS)), flows=flows_below(timeline, PACKAGE_SPANS)
    )
    samples: dict[str, list[tuple[float, float, int]]] = {"tracekern": [], "perfetto package": []}
    for _ in range(rounds):
        samples["tracekern"].append(timed(lambda: sum(len(piece) for piece in encode(prepare(timeline)))))
        samples["perfetto package"].append(timed(lambda: encode_with_package(small)))
    spans = {"tracekern": len(timeline.spans), "perfetto package": len(small.spans)}
    return {
        name: {
            "spans": spans[name],
            "bytes_per_span": rows[0][2] / spans[name],
            "cpu_spans_per_s": [spans[name] / cpu for _, cpu, _ in rows],
            "wall_spans_per_s": [spans[name] / wall for wall, _, _ in rows],
        }
        for name, rows in samples.items()
    }


def timed(work: Callable[[], int]) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds of this process, what `work` returned)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def flows_below(timeline: Timeline, num_spans: int) -> Flows:
    """Flows, a tenth as many as spans, between the first spans: the package does not ask whether they are true."""
    signals = np.arange(0, num_spans, 10, dtype=np.int64)
    return Flows(signals, signals + 1)


def encode_with_package(timeline: Timeline) -> int:
    """Track events by StreamingTraceProtoBuilder: interned names, two annotations, launch, epoch, flows."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    file = io.BytesIO()
    builder = StreamingTraceProtoBuilder(file)
    spans = timeline.spans
    flow_of = dict(zip(timeline.flows.signal.tolist(), range(len(timeline.flows)), strict=True))
    wait_of = dict(zip(timeline.flows.wait.tolist(), range(len(timeline.flows)), strict=True))
    columns = (spans.track, spans.event, spans.start, spans.end, spans.begin_payload)
    for index, (track, event, start, end, payload) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        for time_ns, kind in ((start, TrackEvent.TYPE_SLICE_BEGIN), (end, TrackEvent.TYPE_SLICE_END)):
            packet = builder.create_packet()
            packet.timestamp = time_ns
            packet.trusted_packet_sequence_id = 2
            packet.sequence_flags = 2
            packet.track_event.type = kind
            packet.track_event.track_uuid = track + 10
            if kind == TrackEvent.TYPE_SLICE_BEGIN:
                packet.track_event.name_iid = event + 1
                packet.track_event.category_iids.append(event + 1)
                for name_iid, value in ((1, payload & 1023), (2, payload >> 10), (4, 7)):
                    annotation = packet.track_event.debug_annotations.add()
                    annotation.name_iid = name_iid
                    annotation.int_value = value
                launch = packet.track_event.debug_annotations.add()
                launch.name_iid = 3
                launch.string_value_iid = 1
                if index in flow_of:
                    packet.track_event.flow_ids.append(flow_of[index])
            elif index in wait_of:
                packet.track_event.terminating_flow_ids.append(wait_of[index])
            builder.write_packet(packet)
    return len(file.getvalue())


def measure_merge(directory: Path, num_spans: int, rounds: int) -> Measured:
    """Merges of one capture, each in a process of its own."""
    capture = make_capture(directory, num_spans)
    trace = directory / "trace.pftrace.gz"
    runs = []
    for _ in range(rounds):
        command = [sys.executable, __file__, "--merge", str(capture), str(trace)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=child_environment())
        runs.append(json.loads(done.stdout))
    for dump in capture.iterdir():
        dump.unlink()
    return {"spans": runs[0]["spans"], "flows": runs[0]["flows"], "trace_bytes": runs[0]["bytes"], "runs": runs}


def child_environment() -> dict[str, str]:
    """This process's, with the same places to import from."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def merge_once(capture: str, trace: str) -> None:
    """The child: prints what it took as JSON. Its start and imports count into memory, not into time."""
    wall, cpu = time.perf_counter(), time.process_time()
    timeline = load(capture)
    stats = write_perfetto(timeline, trace)
    result = {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_bytes": resident_bytes("VmHWM"),
        "spans": stats.spans,
        "flows": stats.flows,
        "bytes": stats.bytes,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result))


def judge(encoders: dict[str, Measured], merges: list[Measured]) -> list[Measured]:
    """Each bound with what was measured."""
    ours, theirs = (statistics.median(encoders[name]["cpu_spans_per_s"]) for name in ("tracekern", "perfetto package"))
    judged = min(merges, key=lambda merge: abs(merge["spans"] - MERGE_SPANS))
    first, last = (seconds_per_span(merge) for merge in (merges[0], merges[-1]))
    rows = [
        ("encoder, M spans/s on one core", ours / 1e6, ">=", MIN_ENCODER_SPANS_PER_S / 1e6),
        ("encoder / perfetto package", ours / theirs, ">=", MIN_RATIO),
        ("merge, M spans/s on two cores", speed(judged, "wall_s") / 1e6, ">=", MIN_MERGE_SPANS_PER_S / 1e6),
        ("merge, peak bytes a span", peak(judged), "<=", MAX_BYTES_PER_SPAN),
        ("seconds a span, largest / smallest merge", last / first, "<=", MAX_GROWTH),
    ]
    return [
        {"what": what, "measured": value, "bound": f"{sign} {bound:g}", "met": (value >= bound) == (sign == ">=")}
        for what, value, sign, bound in rows
    ]


def speed(merge: Measured, clock: str) -> float:
    return statistics.median(merge["spans"] / run[clock] for run in merge["runs"])


def seconds_per_span(merge: Measured) -> float:
    return 1 / speed(merge, "cpu_s")


def peak(merge: Measured) -> float:
    return max(run["peak_bytes"] for run in merge["runs"]) / merge["spans"]


def print_tables(encoders: dict[str, Measured], merges: list[Measured], verdicts: list[Measured]) -> None:
    table = Table("encoder, one thread, no gzip", ["writer", "spans", "M spans/s (CPU)", "spread", "bytes/span"])
    for name, row in encoders.items():
        table.add(name, f"{row['spans']:,}", *median_and_spread(row["cpu_spans_per_s"]), f"{row['bytes_per_span']:.0f}")
    table.print()
    columns = ["spans", "flows", "M spans/s (wall)", "spread", "M spans/s (CPU)", "peak bytes/span", "trace bytes/span"]
    table = Table("merge: dumps of 8 ranks -> .pftrace.gz", columns)
    for merge in merges:
        walls = [merge["spans"] / run["wall_s"] for run in merge["runs"]]
        rest = (
            f"{speed(merge, 'cpu_s') / 1e6:.2f}",
            f"{peak(merge):.0f}",
            f"{merge['trace_bytes'] / merge['spans']:.1f}",
        )
        table.add(f"{merge['spans']:,}", f"{merge['flows']:,}", *median_and_spread(walls), *rest)
    table.print()
    table = Table("bounds", ["what", "measured", "bound", "met"])
    for verdict in verdicts:
        table.add(verdict["what"], f"{verdict['measured']:.2f}", verdict["bound"], "yes" if verdict["met"] else "NO")
    table.print()


def median_and_spread(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values) / 1e6:.3f}", f"{min(values) / 1e6:.3f}..{max(values) / 1e6:.3f}"


if __name__ == "__main__":
    main()
