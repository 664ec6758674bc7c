"""Reads damaged captures as a user does, and says which of them ended in anything but a result or one clear line.

    python tests/damaged_cases.py [--seed 1] [--first 0] [--count 200]

Case i of a seed is the same in every run: --first i --count 1 repeats it alone, with its traceback. The process may
not take more than MAX_BYTES of memory, nor a case more than MAX_SECONDS. Prints a line a fault and then, as JSON, the
counts; exits with 1 where there is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gzip
import io
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.captures import EVENT_TABLE, START_NS, CaptureSpec, metadata, write_capture
from tests.damage import IN_DEPTH, SECTIONS, Parts, build, damage_manifest, damage_profile
from tests.pairs import end_bits_of, pairs_of
from tests.paths import TRACES
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.summary import summarize
from tracekern.cli.commands.info import info
from tracekern.dump import format as fmt
from tracekern.errors import TracekernError
from tracekern.export.write import save
from tracekern.gate.compare import Rules, compare
from tracekern.gate.run import Run, read_run
from tracekern.segment.manifest import write_manifest
from tracekern.timeline.load import load
from tracekern.timeline.model import Timeline
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.report_page import report_page

MAX_BYTES = 6 << 30
"""Of address space, most of which numpy's threads reserve and never touch."""
MAX_SECONDS = 20
BITS = end_bits_of(EVENT_TABLE)
CHOICES = [name for name in SECTIONS for _ in range(3 if name in IN_DEPTH else 1)]
MOVED = "all times of all ranks"


class TooSlow(Exception):
    """A case ran into its time limit."""


@dataclasses.dataclass
class Base:
    """A sound capture that cases damage."""

    directory: Path
    parts: dict[str, Parts]
    """By file name."""
    run: Run


def make_bases(scratch: Path) -> list[Base]:
    """Small ones of the tests' own and two kept ones; the first is drawn most."""
    spec = CaptureSpec(num_ranks=3, launches=2, groups=2, host_spans=3, killed_rank=2)
    ordinary = write_capture(scratch / "ordinary", spec)
    alone = write_capture(scratch / "alone", CaptureSpec(num_ranks=1, num_blocks=1, groups=1, host_spans=1))
    ring = write_capture(scratch / "ring", dataclasses.replace(spec, num_ranks=2, launches=3, killed_rank=-1))
    for path in sorted(ring.glob("*.tkdump")):
        _as_ring(path)
    kept = []
    for name, ranks in (("h200x4", (0, 1)), ("h200x4_late_host", (0, 2))):
        kept.append(scratch / name)
        kept[-1].mkdir()
        for rank in ranks:
            for path in (TRACES / name).glob(f"rank_{rank:05d}.*"):
                shutil.copy(path, kept[-1])
        shutil.copy(TRACES / name / fmt.MANIFEST_NAME, kept[-1])
    for directory in (ordinary, ring, alone):
        (directory / fmt.torch_profile_file_name(0)).write_bytes(gzip.compress(json.dumps(_profile()).encode()))
        write_manifest(directory, metadata(spec, 0)["run_id"])
    found = (ordinary, ordinary, ordinary, ring, ring, alone, kept[0], kept[1])
    bases = {
        path: Base(path, {dump.name: Parts.of(dump) for dump in path.glob("*.tkdump")}, _run(path)) for path in found
    }
    return [bases[path] for path in found]


def _run(directory: Path) -> Run:
    with contextlib.suppress(TracekernError):
        return read_run(directory)
    return read_run(next(TRACES.glob("h200x4")))


def _as_ring(path: Path) -> None:
    """The dump of a flight recorder: the oldest records gone, one torn, a fault."""
    parts = Parts.of(path)
    for idx, (headers, records) in enumerate(zip(parts.headers, parts.records, strict=True)):
        starts, spans = headers["start_ticks"].tolist(), np.split(records, np.cumsum(headers["written"])[:-1])
        tracks = [pairs_of(of_one, start, 0, BITS) for of_one, start in zip(spans, starts, strict=True)]
        headers["written"] = [len(track) for track in tracks]
        headers["attempted"] = headers["written"] + 7
        headers["started"], headers["missing"][0] = fmt.STARTED_RING, 1
        parts.records[idx] = np.concatenate(tracks)[3:]
        headers["written"][0] -= 3
    parts.metadata |= {"keep": "last", "fault": None, "fault_text": "rank 0 send block 0 warp 0 gave up on rank 1"}
    metadata_now, payload = parts.layout()
    path.write_bytes(build(json.dumps(metadata_now).encode(), payload))


def _profile() -> dict[str, Any]:
    rows = [
        {"ph": "X", "cat": cat, "name": f"{cat} {idx}", "pid": 7, "tid": 9, "ts": START_NS / 1000 + idx, "dur": 0.5}
        for idx in range(3)
        for cat in ("kernel", "cpu_op")
    ]
    return {"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": rows}


def damage_capture(draw: random.Random, base: Base, directory: Path) -> str:
    """Writes a damaged copy of `base`. Returns what was damaged."""
    shutil.copytree(base.directory, directory)
    dumps, others = sorted(base.parts), ["torch profile", "manifest"]
    if draw.random() < 0.04:
        same = draw.random()
        for file in dumps:
            (directory / file).write_bytes(SECTIONS["all times"](random.Random(same), copy.deepcopy(base.parts[file])))
        return MOVED
    files = draw.choices([*dumps * (24 // len(dumps)), *others], k=draw.choice((1, 1, 1, 2, 3)))
    sections = []
    for file in sorted(set(files)):
        sections.append(file if file in others else draw.choice(CHOICES))
        if file == "manifest":
            damage_manifest(draw, directory / fmt.MANIFEST_NAME)
        elif file == "torch profile":
            for path in sorted(directory.glob("*.torch.json.gz"))[:1]:
                damage_profile(draw, path)
        else:
            (directory / file).write_bytes(SECTIONS[sections[-1]](draw, copy.deepcopy(base.parts[file])))
    return " + ".join(sections)


def read_as_a_user(draw: random.Random, base: Base, directory: Path, out: Path) -> bool:
    """Whether something could be read. Whatever is refused is a TracekernError of one line."""
    readable = False
    for options in ({}, {"unaligned": True}, {"partial": True}, {"strict": True, "partial": True}):
        with refusing():
            timeline = load(directory, **options)
            readable = True
            if not options.get("strict"):
                use(timeline, out, is_full=draw.random() < 0.4)
    with refusing(), contextlib.redirect_stdout(io.StringIO()):
        info([directory], False, draw.random() < 0.5)
    with refusing():
        write_manifest(directory, base.run.run_id)
    with refusing():
        gate(base.run, read_run(directory, draw.random() < 0.5))
    return readable


def use(timeline: Timeline, out: Path, is_full: bool) -> None:
    """Numbers, headlines, page and traces of a timeline, whose times must not have wrapped around."""
    spans, marks = timeline.spans, timeline.marks
    assert not len(spans) or spans.start.min() >= 0, f"a span begins at {spans.start.min()}"
    assert (spans.is_open | (spans.end >= spans.start)).all(), "a span ends before it begins"
    assert not len(marks) or marks.time.min() >= 0, f"a mark is at {marks.time.min()}"
    with refusing():
        summarize(timeline).as_dict()
    with refusing():
        findings = analyze(timeline)
        headlines(findings)
        if is_full:
            report_page(findings, "capture", "capture", "tracekern open capture")
    for name in ("out.pftrace", "out.json", "out.parquet") if is_full else ("out.pftrace",):
        with refusing():
            save(timeline, out / name)


def gate(base: Run, head: Run) -> None:
    """Launches of the sound capture and of the damaged one."""
    sides = [
        [dataclasses.replace(run, run_id=f"{side} {idx}", losses=()) for idx in range(5)]
        for side, run in (("base", base), ("head", head))
    ]
    compare(*sides, Rules()).as_dict()


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Lets a refusal pass that says what to do on one line."""
    try:
        yield
    except TracekernError as error:
        text = str(error)
        if not text or "\n" in text or len(text) > 2000:
            raise AssertionError(f"refused with {text[:3000]!r}, wanted one line") from error


def run_case(seed: int, index: int, bases: list[Base], scratch: Path) -> tuple[str, str, str]:
    """(what was damaged, "read" or "refused" or "fault", traceback)"""
    draw = random.Random(seed * 1_000_003 + index)
    base, directory = draw.choice(bases), scratch / "damaged"
    shutil.rmtree(directory, ignore_errors=True)
    section = "?"

    def give_up(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(MAX_SECONDS)
    try:
        section = damage_capture(draw, base, directory)
        return section, "read" if read_as_a_user(draw, base, directory, scratch) else "refused", ""
    except (Exception, TooSlow):  # noqa: BLE001 all of them are what this looks for
        return section, "fault", traceback.format_exc()
    finally:
        signal.alarm(0)


def _last_line(trace: str) -> str:
    """The error and the innermost line of the package that it came through."""
    *_, where = [line.strip() for line in trace.split("\n") if "/tracekern/" in line] or [""]
    return f"{trace.strip().split(chr(10))[-1][:200]} at {where.rpartition('/tracekern/')[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seed", 1), ("first", 0), ("count", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    warnings.simplefilter("error", RuntimeWarning)
    outcomes: dict[str, Counter[str]] = {"one section": Counter(), "all": Counter()}
    slowest = (0.0, -1)
    with tempfile.TemporaryDirectory() as folder:
        bases = make_bases(Path(folder))
        for index in range(options.first, options.first + options.count):
            began = time.perf_counter()
            section, outcome, trace = run_case(options.seed, index, bases, Path(folder))
            slowest = max(slowest, (time.perf_counter() - began, index))
            outcomes["all"][outcome] += 1
            if " + " not in section:
                outcomes["one section"][f"{section}: {outcome}"] += 1
            if outcome == "fault":
                text = trace if options.count == 1 else _last_line(trace)
                print(f"--seed {options.seed} --first {index} --count 1: {section}: {text}", flush=True)
    # Not ru_maxrss: that begins with the memory of the process that started this one.
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
    counts = {name: dict(sorted(counter.items())) for name, counter in outcomes.items()}
    print(json.dumps({**counts, "slowest_s": round(slowest[0], 2), "slowest": slowest[1], "peak_mib": peak}))
    return 1 if outcomes["all"]["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
