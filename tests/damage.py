"""Damages a capture at one or several places and puts right checksums around it, so that readers get to the contents.

Everything that is drawn comes from one random.Random, so a case is the same in every run.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracekern.dump import format as fmt
from tracekern.dump.fault import FAULT_RECORD, describe_fault, parse_fault
from tracekern.dump.reader import read_dump

EXTREMES = (
    *(0, 1, -1, 2, 63, 64, 1000, 10**9, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 53),
    *((1 << 62) - 1, 1 << 62, (1 << 63) - 1, -(1 << 62), -(1 << 63), 1 << 63, (1 << 64) - 1),
)
WILD: tuple[Any, ...] = (
    *(*EXTREMES, 1 << 70, -(1 << 70), None, True, False, "", "x", "\ud800", "a" * 300, 0.5, 1e308, -1e308),
    *(float("nan"), float("inf"), [], {}, [[]], [{}], {"": 0}),
)
STEPS = (1, -1, 31, -1000, 10**6, -(10**9), 1 << 31, 1 << 40, -(1 << 40), 1 << 53, 1 << 60, -(1 << 60), 1 << 62)
FAULT_NAMES = {
    "rank_barrier": 0,
    "channels": ["barrier"],
    "kernels": [{"first_stage": 1, "stages": ["send", "receive"], "channels": ["token"]}],
}
Rows = np.ndarray


@dataclass
class Parts:
    """A dump taken apart: what can be damaged by itself."""

    metadata: dict[str, Any]
    clock_samples: Rows
    host_spans: Rows
    headers: list[Rows]
    records: list[Rows]

    @staticmethod
    def of(path: Path) -> Parts:
        dump = read_dump(path)
        stops = [entry.records_offset + entry.records_count * 16 for entry in dump.launches]
        headers = list(map(dump.track_headers, dump.launches))
        records = [
            dump.payload[entry.records_offset : stop].view(
                fmt.SPAN_RECORD if (tracks["started"] == fmt.STARTED).any() else fmt.WIDE_RECORD
            )
            for entry, stop, tracks in zip(dump.launches, stops, headers, strict=True)
        ]
        return copy.deepcopy(Parts(dump.metadata, dump.clock_samples(), dump.host_spans(), headers, records))

    def layout(self) -> tuple[dict[str, Any], bytearray]:
        """The metadata, with the places of all sections as they are now, and the payload."""
        metadata, payload = copy.deepcopy(self.metadata), bytearray()

        def place(rows: Rows) -> int:
            offset = len(payload)
            payload.extend(rows.tobytes())
            payload.extend(bytes(-len(payload) % fmt.ALIGNMENT))
            return offset

        for key in ("clock_samples", "host_spans"):
            rows = getattr(self, key)
            metadata[key] = {"offset": place(rows), "count": len(rows)}
        planes = bytearray()
        for entry, rows in zip(metadata["launches"], self.headers, strict=True):
            entry |= {"headers_offset": len(planes), "num_tracks": len(rows)}
            planes += fmt.pack_planes(rows).tobytes()
        stream = np.frombuffer(zlib.compress(planes, 1), np.uint8)
        metadata["packed_headers"] = {"offset": place(stream), "bytes": len(stream)}
        for entry, rows in zip(metadata["launches"], self.records, strict=True):
            entry |= {"records_offset": place(rows), "records_count": len(rows)}
        return metadata, payload


def build(text: bytes, payload: bytes | bytearray, changes: dict[str, int] | None = None) -> bytes:
    """The file, its sizes and checksums right but for `changes` of its header."""
    start = fmt.align_up(fmt.DUMP_HEADER.itemsize + len(text))
    header = np.zeros(1, fmt.DUMP_HEADER)
    sizes = (len(text), len(payload), zlib.crc32(text), zlib.crc32(payload), start + len(payload))
    header[0] = (np.void(fmt.DUMP_MAGIC), fmt.DUMP_VERSION, fmt.DUMP_HEADER.itemsize, *sizes, np.void(bytes(16)))
    for field, value in (changes or {}).items():
        header[field] = value & ((1 << 8 * header.dtype[field].itemsize) - 1)
    return header.tobytes() + text + bytes(start - fmt.DUMP_HEADER.itemsize - len(text)) + bytes(payload)


def damage_rows(draw: random.Random, rows: Rows) -> Rows:
    """Some rows of a table with other numbers, in another order, or more or fewer of them."""
    if not len(rows):
        return rows
    some = draw.choice(
        (slice(None), [draw.randrange(len(rows))], [draw.randrange(len(rows)) for _ in range(4)], slice(-1, None))
    )
    return draw.choice((_set_field,) * 6 + (_reorder,))(draw, rows.copy(), some)


def _set_field(draw: random.Random, rows: Rows, some: Any) -> Rows:
    names = [name for name in rows.dtype.names or () if rows.dtype[name].kind in "iu"]
    times = [name for name in names if rows.dtype[name].itemsize == 8]
    name = draw.choice(times if times and draw.random() < 0.6 else names)
    as_bits = np.dtype(rows.dtype[name].str.replace("i", "u"))
    bits = rows[name].astype(as_bits)
    mask = (1 << 8 * as_bits.itemsize) - 1
    way = draw.randrange(5)
    if way == 0:
        bits[some] ^= as_bits.type(1 << draw.randrange(8 * as_bits.itemsize))
    elif way == 1:
        bits[some] += as_bits.type(draw.choice(STEPS) & mask)
    elif way == 2:
        bits[some] = rows[draw.choice(names)][some].astype(as_bits)
    else:
        bits[some] = draw.choice(EXTREMES) & mask
    rows[name] = bits.astype(rows.dtype[name])
    return rows


def _reorder(draw: random.Random, rows: Rows, some: Any) -> Rows:
    number = len(rows)
    order = list(range(number))
    shuffled = draw.sample(order, number)
    picks = (shuffled, order[::-1], order[: draw.randrange(number)], order * 2, [order[0]] * number, shuffled[:2])
    zeroed = rows.copy()
    zeroed[some] = np.zeros((), rows.dtype)
    return draw.choice((*(rows[pick] for pick in picks), zeroed))


def damage_json(draw: random.Random, value: Any, keep: tuple[str, ...] = ()) -> Any:
    """A JSON value with something in it replaced, left out, there twice, or in another order."""
    value = copy.deepcopy(value)
    paths = [path for path in walk(value) if path and path[0] not in keep]
    if not paths:
        return draw.choice(WILD)
    # By depth first: a table of thousands of numbers must not take all the draws.
    deep = draw.choice(sorted({len(path) for path in paths}))
    path = draw.choice([path for path in paths if len(path) == deep])
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    way, key = draw.randrange(8), path[-1]
    if way == 0:
        del parent[key]
    elif way == 1 and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    elif way == 2 and isinstance(parent, list):
        draw.shuffle(parent)
    elif way == 3 and isinstance(parent[key], int):
        parent[key] += draw.choice(STEPS)
    else:
        parent[key] = copy.deepcopy(draw.choice(WILD))
    return value


def walk(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [inner for key, child in children for inner in walk(child, (*path, key))]


def flip_bits(draw: random.Random, data: bytes | bytearray) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 30)) if changed else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _in_rows(key: str) -> Callable[[random.Random, Parts], bytes]:
    def damage(draw: random.Random, parts: Parts) -> bytes:
        for _ in range(draw.choice((1, 1, 2, 3))):
            setattr(parts, key, damage_rows(draw, getattr(parts, key)))
        return _pack(*parts.layout())

    return damage


def _in_launch(key: str) -> Callable[[random.Random, Parts], bytes]:
    """Track headers or records. As many records follow as the headers then say, so that these are believed."""

    def damage(draw: random.Random, parts: Parts) -> bytes:
        tables = getattr(parts, key)
        for idx in range(len(tables)) if draw.random() < 0.2 else [draw.randrange(max(1, len(tables)))]:
            if tables:
                tables[idx] = damage_rows(draw, tables[idx])
                total = int(parts.headers[idx]["written"].sum(dtype=np.int64))
                if total < 1 << 16 and draw.random() < 0.9 and len(parts.records[idx]):
                    parts.records[idx] = np.resize(parts.records[idx], total)
        return _pack(*parts.layout())

    return damage


def _kinds_of_tracks(draw: random.Random, parts: Parts) -> bytes:
    """Rings, tracks that count cycles and tracks that never ended, with what belongs to them and then one fault."""
    for headers in parts.headers:
        headers["started"] = draw.choice((fmt.STARTED_RING, fmt.STARTED_CYCLES))
        headers["attempted"] += draw.randrange(50)
        headers["elapsed_cycles"] = draw.choice((0, 1, 2000, 1 << 40, (1 << 64) - 1))
        headers["finished"][draw.randrange(len(headers)) :] = draw.randrange(2)
    return _in_launch(draw.choice(("headers", "records")))(draw, parts)


def _times(draw: random.Random, parts: Parts) -> bytes:
    """All times of a rank moved alike: nothing contradicts anything within it."""
    step, fields = draw.choice((*STEPS, (1 << 62) - (1 << 51), (1 << 63) - (1 << 51))), ("start_ticks", "end_ticks")
    for headers, records in zip(parts.headers, parts.records, strict=True):
        of_records = tuple(name for name in ("ticks", "begin", "end") if name in (records.dtype.names or ()))
        for rows, names in ((headers, fields), (records, of_records)):
            for name in names:
                rows[name] += rows[name].dtype.type(step & ((1 << 8 * rows[name].dtype.itemsize) - 1))
    which = draw.randrange(4)
    names = (("t0", "t1", "t2", "t3"), ("t1", "t2"), ("t0", "t3"), ())[which]
    for name in names:
        parts.clock_samples[name] += np.int64(min(step, (1 << 63) - 1))
    if draw.random() < 0.3:
        for name in ("start_ns", "end_ns"):
            parts.host_spans[name] += np.int64(min(step, (1 << 63) - 1))
    return _pack(*parts.layout())


def _in_metadata(*within: str) -> Callable[[random.Random, Parts], bytes]:
    """Anywhere, or in some tables of the metadata."""

    def damage(draw: random.Random, parts: Parts) -> bytes:
        metadata, payload = parts.layout()
        for _ in range(draw.choice((1, 1, 2, 4))):
            if within:
                key = draw.choice(within)
                metadata[key] = damage_json(draw, metadata[key])
            else:
                metadata = damage_json(draw, metadata)
                if not isinstance(metadata, dict):
                    break
        return _pack(metadata, payload)

    return damage


def _in_text(draw: random.Random, parts: Parts) -> bytes:
    metadata, payload = parts.layout()
    text = json.dumps(metadata).encode()
    cut = draw.randrange(len(text))
    return build(draw.choice((flip_bits(draw, text), text[:cut], text[:cut] + b"\xff" + text[cut:])), payload)


def _between_sections(draw: random.Random, parts: Parts) -> bytes:
    """Sections that trade places or share one, and bytes that are anything, wherever they are."""
    metadata, payload = parts.layout()
    places = [(metadata[key], "offset") for key in ("clock_samples", "host_spans")]
    places += [(entry, key) for entry in metadata["launches"] for key in ("headers_offset", "records_offset")]
    (one, key), (other, other_key) = draw.choice(places), draw.choice(places)
    way = draw.randrange(3)
    if way == 0:
        one[key], other[other_key] = other[other_key], one[key]
    elif way == 1:
        one[key] = other[other_key]
    elif payload:
        for _ in range(draw.choice((1, 4, 40))):
            value = draw.choice((*EXTREMES, draw.getrandbits(64)))
            struct.pack_into("<Q", payload, draw.randrange(max(1, len(payload) // 8)) * 8, value & ((1 << 64) - 1))
    return _pack(metadata, payload)


def _in_file_header(draw: random.Random, parts: Parts) -> bytes:
    metadata, payload = parts.layout()
    fields = [name for name in fmt.DUMP_HEADER.names or () if fmt.DUMP_HEADER[name].kind == "u"]
    changes = {draw.choice(fields): draw.choice(EXTREMES) for _ in range(draw.choice((1, 1, 3)))}
    return build(json.dumps(metadata).encode(), payload, changes)


def _in_file(draw: random.Random, parts: Parts) -> bytes:
    """Cut short, too long, or flipped, and the checksums left as they were."""
    data = _pack(*parts.layout())
    return draw.choice((data[: draw.randrange(len(data))], data + data[:64], flip_bits(draw, data), data[64:]))


def _fault_record(draw: random.Random, parts: Parts) -> bytes:
    """The record of a fault as a kernel left it in the segment, read as the packer does."""
    record = np.zeros(1, FAULT_RECORD)
    record["cause"], record["peer"], record["waited_ns"] = draw.randrange(1, 3), 1, 10**9
    raw = damage_rows(draw, damage_rows(draw, record)[:1])
    fault = parse_fault((raw if len(raw) else record)[:1].tobytes(), FAULT_NAMES)
    parts.metadata |= {"fault": fault, "fault_text": describe_fault(fault) if fault else ""}
    return _in_metadata("fault", "fault_text")(draw, parts) if draw.random() < 0.5 else _pack(*parts.layout())


def _pack(metadata: Any, payload: bytearray) -> bytes:
    return build(json.dumps(metadata).encode(), payload)


SECTIONS: dict[str, Callable[[random.Random, Parts], bytes]] = {
    "file": _in_file,
    "file header": _in_file_header,
    "metadata text": _in_text,
    "metadata": _in_metadata(),
    "launch table": _in_metadata("launches"),
    "event tables and roles": _in_metadata("event_tables", "role_tables"),
    "clock": _in_metadata("clock"),
    "clock samples": _in_rows("clock_samples"),
    "host spans": _in_rows("host_spans"),
    "track headers": _in_launch("headers"),
    "records": _in_launch("records"),
    "rings and cycles": _kinds_of_tracks,
    "all times": _times,
    "places of sections": _between_sections,
    "fault": _fault_record,
}
"""What of a dump is damaged, and how. A function may change the parts that it gets."""
IN_DEPTH = ("clock samples", "host spans", "track headers", "records", "rings and cycles", "all times", "clock")
"""Sections whose numbers are used far from the reader: drawn more often."""


def damage_profile(draw: random.Random, path: Path) -> None:
    """The trace of torch.profiler beside a dump."""
    text = gzip.decompress(path.read_bytes())
    if draw.random() < 0.7:
        text = json.dumps(damage_json(draw, json.loads(text))).encode()
    else:
        text = draw.choice((flip_bits(draw, text), text[: draw.randrange(len(text))]))
    packed = gzip.compress(text, 1, mtime=0)
    path.write_bytes(packed if draw.random() < 0.9 else flip_bits(draw, packed))


def damage_manifest(draw: random.Random, path: Path) -> None:
    """The table of contents, which says what no dump says."""
    text = path.read_bytes()
    damaged = json.dumps(damage_json(draw, json.loads(text))).encode()
    path.write_bytes(draw.choice((damaged, damaged, flip_bits(draw, text), b"")))
