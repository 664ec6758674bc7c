"""Reads a dump: one rank's records on disk, in one self-describing file. segment/pack.py writes it.

Everything but the records is checked on opening (magic, version, sizes, checksums, schema, offsets, ranges), so that
later code need not check.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump import ranges
from tracekern.dump.event_table import EVENT_KEYS
from tracekern.errors import BadInput
from tracekern.formatting import brief

_INT_LIMIT = 1 << 63
_OLDER = {2: " (2 has two records a span)"}
_TEXT_KEYS = (
    "run_id",
    "node",
    "created",
    "state",
    "tracekern",
    "backend",
    "device",
    "command",
    "note",
)


@dataclass(frozen=True)
class Part:
    """An array in the payload."""

    offset: int
    count: int

    def as_json(self) -> dict[str, int]:
        return {"offset": self.offset, "count": self.count}


_LAUNCH_TEXTS = ("name", "key")
_LAUNCH_OPTIONAL = {"blocks_run": 0, "shared_tracks": 0, "host_ns": 0, "waited_ns": 0, "key": "", "by_host": 0}


@dataclass(frozen=True)
class LaunchSection:
    """One launch of a dump; offsets count from the payload's start, headers_offset from that of `Dump.headers`."""

    launch_idx: int
    name: str
    stream: int
    event_table: int
    role_table: int
    epoch: int
    num_blocks: int
    warps_per_block: int
    block_first: int
    block_stop: int
    block_step: int
    num_tracks: int
    records_per_track: int
    sequence: int
    headers_offset: int
    records_offset: int
    records_count: int
    blocks_run: int = 0
    """Number of blocks that ran, if more than num_blocks; else 0."""
    shared_tracks: int = 0
    """Number of tracks that more than one recorder wrote to."""
    host_ns: int = 0
    """Host time when the host asked for the launch, before its kernel was launched; 0: not known."""
    waited_ns: int = 0
    """How long the host waited for the launch's region to be reserved."""
    key: str = ""
    """What the program calls the launch."""
    by_host: int = 0
    """1: no launch; threads of the host wrote its tracks, in host time."""

    @staticmethod
    def entry_keys() -> list[str]:
        """Returns the fields that the segment's LaunchEntry has with the same name and meaning."""
        names = [field.name for field in fields(LaunchSection)]
        return [
            name
            for name in names
            if name in (fmt.LAUNCH_ENTRY.names or ()) and "offset" not in name and name not in _LAUNCH_TEXTS
        ]


_LAUNCH_INTEGERS = tuple(field.name for field in fields(LaunchSection) if field.name not in _LAUNCH_TEXTS)


@dataclass(frozen=True)
class Dump:
    """One rank's capture: checked metadata and views into the payload. Nothing is copied."""

    path: Path
    metadata: dict[str, Any]
    launches: tuple[LaunchSection, ...]
    payload: npt.NDArray[np.uint8]
    headers: npt.NDArray[np.uint8]
    """Those of all launches, uncompressed; in a dump of version 3 the payload."""

    __repr__ = brief

    @property
    def rank(self) -> int:
        return int(self.metadata["rank"])

    @property
    def run_id(self) -> str:
        return str(self.metadata["run_id"])

    @property
    def max_ticks(self) -> int:
        """Any time beyond it on the rank's clock is damage."""
        return ranges.latest_ticks(self.metadata["clock"]["ticks_per_second"])

    def part(self, by_host: bool) -> Dump:
        """Returns a dump of the launches alone, or of the tracks alone that threads of the host wrote."""
        launches = tuple(launch for launch in self.launches if bool(launch.by_host) is by_host)
        if not by_host:
            return replace(self, launches=launches)
        about = {"clock": self.metadata["clock"] | fmt.HOST_CLOCK, "clock_samples": Part(0, 0).as_json()}
        return replace(self, launches=launches, metadata=self.metadata | about)

    def each(self, every: int) -> Dump:
        """Returns a dump of each so-many-th launch of every kernel, as if no other had been recorded."""
        kept = tuple(launch for launch in self.launches if launch.by_host or launch.sequence % every == 0)
        return replace(self, launches=kept)

    def without_launches(self) -> Dump:
        """Returns a dump of what is not of launches, in memory of its own; its file is not needed any more."""
        samples, ranges_of_host = self.clock_samples(), self.host_spans()
        payload = np.frombuffer(samples.tobytes() + ranges_of_host.tobytes(), np.uint8)
        about = {
            "launches": [],
            "clock_samples": Part(0, len(samples)).as_json(),
            "host_spans": Part(samples.nbytes, len(ranges_of_host)).as_json(),
        }
        return replace(self, metadata=self.metadata | about, launches=(), payload=payload, headers=payload[:0])

    def clock_samples(self) -> npt.NDArray[Any]:
        """[n] CLOCK_SAMPLE."""
        return self._part("clock_samples", fmt.CLOCK_SAMPLE)

    def host_spans(self) -> npt.NDArray[Any]:
        """[n] HOST_SPAN."""
        return self._part("host_spans", fmt.HOST_SPAN)

    def track_headers(self, launch: LaunchSection) -> npt.NDArray[Any]:
        """[num_tracks] TRACK_HEADER; `written` is the number of records in the dump, finished or not."""
        return _view(self.headers, launch.headers_offset, fmt.TRACK_HEADER, launch.num_tracks)

    def all_track_headers(self) -> npt.NDArray[Any]:
        """Returns a copy of the track headers of all launches, one after the other."""
        parts = [np.empty(0, np.uint8)]
        for launch in self.launches:  # as bytes, because numpy compares the fields of structured arrays that it joins
            stop = launch.headers_offset + launch.num_tracks * fmt.TRACK_HEADER.itemsize
            parts.append(self.headers[launch.headers_offset : stop])
        return np.concatenate(parts).view(fmt.TRACK_HEADER)

    def _part(self, key: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        part = self.metadata[key]
        return _view(self.payload, part["offset"], dtype, part["count"])


def read_dump(path: Path | str) -> Dump:
    """Opens and checks a dump. Raises BadInput with one line for anything that is not a complete, sound dump."""
    path = Path(path)
    header, metadata, payload = _open(path)
    _check_crc(path, "payload", payload, int(header["payload_crc32"]))
    launches = _check_metadata(str(path), metadata, len(payload))
    dump = Dump(path, metadata, launches, payload, _all_headers(path, metadata, launches, payload))
    _check_counts(dump)
    ranges.check_track_headers(str(path), dump.all_track_headers(), dump.max_ticks)
    ranges.check_clock_samples(str(path), dump.clock_samples(), dump.max_ticks)
    ranges.check_host_spans(str(path), dump.host_spans())
    return dump


def peek_metadata(path: Path | str) -> dict[str, Any]:
    """Returns the checked metadata of a dump without reading its payload. Raises BadInput like read_dump."""
    path = Path(path)
    _, metadata, payload = _open(path)
    _check_metadata(str(path), metadata, len(payload))
    return dict(metadata)


def run_in(path: Path) -> str:
    """Returns the run id of the dump at `path`; "" if there is no sound dump."""
    try:
        return str(peek_metadata(path)["run_id"])
    except BadInput:
        return ""


def is_whole(path: Path) -> bool:
    """Returns whether a sound dump is complete: not a snapshot of a rank that recorded on."""
    return str(peek_metadata(path)["state"]) != fmt.STATE_NAMES[fmt.SegmentState.RUNNING]


def _open(path: Path) -> tuple[Any, Any, npt.NDArray[np.uint8]]:
    """Returns the checked header, the parsed metadata and the payload."""
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({error}); name a dump or a capture directory") from None
    header = _check_header(path, data)
    header_bytes, metadata_bytes = fmt.DUMP_HEADER.itemsize, int(header["metadata_bytes"])
    text = data[header_bytes : header_bytes + metadata_bytes]
    _check_crc(path, "metadata", text, int(header["metadata_crc32"]))
    try:
        metadata = json.loads(text.tobytes())
        if b"\\ud" in text.tobytes():  # maybe a lone surrogate, as in sys.argv for bytes that are not UTF-8
            metadata = json.loads(json.dumps(metadata, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: metadata is not JSON ({error}); damaged") from None
    return header, metadata, np.asarray(data[fmt.align_up(header_bytes + metadata_bytes) :])


def _check_crc(path: Path, part: str, data: npt.NDArray[np.uint8], wanted: int) -> None:
    if zlib.crc32(data.data) != wanted:
        raise BadInput(f"{path}: checksum of the {part} is wrong: damaged; copy it again from where it was made")


def _check_header(path: Path, data: npt.NDArray[np.uint8]) -> Any:
    header_bytes = fmt.DUMP_HEADER.itemsize
    if len(data) < header_bytes:
        raise BadInput(
            f"{path}: {len(data)} bytes, wanted at least {header_bytes}: not a dump, or cut short; copy it again"
        )
    header = data[:header_bytes].view(fmt.DUMP_HEADER)[0]
    if header["magic"].tobytes() != fmt.DUMP_MAGIC:
        raise BadInput(
            f"{path}: starts with {header['magic'].tobytes()!r}, wanted {fmt.DUMP_MAGIC!r}: not a tracekern dump"
        )
    if int(header["version"]) not in fmt.READABLE_VERSIONS:
        known = " and ".join([", ".join(map(str, fmt.READABLE_VERSIONS[:-1])), str(fmt.READABLE_VERSIONS[-1])])
        raise BadInput(
            f"{path}: dump version {int(header['version'])}, this reader knows {known}"
            f"{_OLDER.get(int(header['version']), '')}; read it with the tracekern that made it"
        )
    metadata_bytes, payload_bytes = int(header["metadata_bytes"]), int(header["payload_bytes"])
    file_bytes = fmt.align_up(header_bytes + metadata_bytes) + payload_bytes
    if int(header["header_bytes"]) != header_bytes or int(header["file_bytes"]) != file_bytes:
        raise BadInput(f"{path}: header does not add up: damaged; copy it again")
    if file_bytes != len(data):
        raise BadInput(f"{path}: {len(data)} bytes, its header says {file_bytes}: cut short or damaged; copy it again")
    return header


def _all_headers(
    path: Path, metadata: dict[str, Any], launches: tuple[LaunchSection, ...], payload: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """Returns Dump.headers. Raises BadInput if what is compressed is not those of the launches."""
    packed = metadata.get("packed_headers")
    if packed is None:
        return payload
    wanted = 0
    for launch in launches:
        if launch.headers_offset != wanted:
            raise BadInput(f"{path}: headers_offset {launch.headers_offset}, wanted {wanted}; damaged")
        wanted += launch.num_tracks * fmt.TRACK_HEADER.itemsize
    stream = payload[packed["offset"] : packed["offset"] + packed["bytes"]]
    unpacker = zlib.decompressobj()
    try:
        planes = unpacker.decompress(stream.data, wanted + 1)  # one more: nothing else may follow
    except zlib.error as error:
        raise BadInput(f"{path}: headers of tracks cannot be unpacked ({error}); damaged") from None
    if len(planes) != wanted or not unpacker.eof:
        raise BadInput(f"{path}: {len(planes)} bytes of headers, its launches have {wanted}; damaged")
    headers = np.empty(wanted, np.uint8)
    for launch in launches:
        part = slice(launch.headers_offset, launch.headers_offset + launch.num_tracks * fmt.TRACK_HEADER.itemsize)
        of_launch = np.frombuffer(planes, np.uint8)[part].reshape(fmt.TRACK_HEADER.itemsize, -1)
        headers[part] = of_launch.T.reshape(-1)
    return headers


def _check_counts(dump: Dump) -> None:
    for launch in dump.launches:
        headers = dump.track_headers(launch)
        total = int(headers["written"].sum(dtype=np.int64))
        if total != launch.records_count:
            raise BadInput(
                f"{dump.path}: launch {launch.launch_idx} has {launch.records_count} records, "
                f"its tracks say {total}; damaged"
            )


def _view(payload: npt.NDArray[np.uint8], offset: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    rows: npt.NDArray[Any] = np.ndarray(count, dtype, payload, offset)  # view(dtype) checks the fields each time
    return rows


class _Checker:
    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, text: str) -> BadInput:
        return BadInput(f"{self.where}: {text}; damaged, or not written by tracekern")

    def get(self, table: Any, key: str, kind: type) -> Any:
        if not isinstance(table, dict) or not isinstance(table.get(key), kind) or isinstance(table.get(key), bool):
            got = repr(table.get(key))[:40] if isinstance(table, dict) else type(table).__name__
            raise self.fail(f"metadata field {key} is {got}, wanted {kind.__name__}")
        return table[key]

    def integer(self, table: Any, key: str, low: int = 0, high: int = _INT_LIMIT) -> int:
        value: int = self.get(table, key, int)
        if not low <= value < high:
            raise self.fail(f"metadata field {key} is {str(value)[:40]}, wanted {low}..{high - 1}")
        return value


def _check_metadata(where: str, metadata: Any, payload_bytes: int) -> tuple[LaunchSection, ...]:
    """Checks the metadata of a dump. Returns its launches. Raises BadInput naming `where` and the field."""
    checker = _Checker(where)
    for key in _TEXT_KEYS:
        checker.get(metadata, key, str)
    num_ranks = checker.integer(metadata, "num_ranks", 1, 1 << 20)
    rank = checker.integer(metadata, "rank", 0, num_ranks)
    _check_group(checker, metadata, rank, num_ranks)
    for key in ("launches_refused", "refused_bytes", "host_spans_lost", "clock_samples_lost"):
        checker.integer(metadata, key)
    for key in ("launches_lost", "launches_counted"):
        checker.integer({key: 0} | metadata, key)  # older dumps have none
    checker.integer({"num_residents": 1} | metadata, "num_residents", 1, num_ranks + 1)
    for lacked in checker.get({"lacking_bodies": []} | metadata, "lacking_bodies", list):
        if not isinstance(lacked, dict):
            raise checker.fail("metadata field lacking_bodies has an item that is no object")
        checker.integer(lacked, "launches", 1)
        for key in ("name", "text"):
            checker.get(lacked, key, str)
    for key in ("refused_text", "counted_text", "fault_text", "killed_by"):
        checker.get({key: ""} | metadata, key, str)
    checker.get({"settings": {}} | metadata, "settings", dict)
    if metadata.get("fault") is not None:
        checker.get(metadata, "fault", dict)
    if metadata.get("roles") is not None:
        _check_names(checker, metadata["roles"])
    _check_choices(checker, metadata)
    _check_clocks(checker, metadata)
    checker.integer(metadata, "packed_ns", 0, fmt.MAX_NS + 1)
    checker.integer({"died_ns": 0} | metadata, "died_ns", 0, fmt.MAX_NS + 1)  # older dumps have none
    _check_overhead(checker, metadata)
    _check_sinks(checker, metadata)
    _check_tables(checker, metadata)
    for key, dtype in (("clock_samples", fmt.CLOCK_SAMPLE), ("host_spans", fmt.HOST_SPAN)):
        part = checker.get(metadata, key, dict)
        count = checker.integer(part, "count")
        _check_range(checker, key, checker.integer(part, "offset"), count * dtype.itemsize, payload_bytes)
    record_bytes = fmt.RECORD_BYTES
    launches = tuple(_launch(checker, metadata, entry) for entry in checker.get(metadata, "launches", list))
    headers_room = _headers_room(checker, metadata, payload_bytes)
    records_stop = 0
    for launch in launches:
        headers_bytes = launch.num_tracks * fmt.TRACK_HEADER.itemsize
        _check_range(checker, "headers_offset", launch.headers_offset, headers_bytes, headers_room)
        _check_range(
            checker, "records_offset", launch.records_offset, launch.records_count * record_bytes, payload_bytes
        )
        if launch.records_offset < records_stop:
            raise checker.fail(f"records of launch {launch.launch_idx} overlap those before it")
        records_stop = launch.records_offset + launch.records_count * record_bytes
    return launches


def _check_group(checker: _Checker, metadata: dict[str, Any], rank: int, num_ranks: int) -> None:
    """Checks the ranks of a group's capture; that of all ranks names none."""
    ranks = checker.get({"ranks": [rank]} | metadata, "ranks", list)
    are_ranks = all(type(other) is int and 0 <= other < num_ranks for other in ranks)
    if not are_ranks or ranks != sorted(set(ranks)) or rank not in ranks:
        raise checker.fail(f"metadata field ranks is {str(ranks)[:40]}, wanted some of {num_ranks}, {rank} among them")


def _headers_room(checker: _Checker, metadata: dict[str, Any], payload_bytes: int) -> int:
    """Checks where the headers of tracks are. Returns how many bytes they can be: zlib packs 1,032 into 1 at most."""
    if "packed_headers" not in metadata:
        return payload_bytes
    packed = checker.get(metadata, "packed_headers", dict)
    num_bytes = checker.integer(packed, "bytes")
    _check_range(checker, "packed_headers", checker.integer(packed, "offset"), num_bytes, payload_bytes)
    return 1032 * num_bytes


def _check_choices(checker: _Checker, metadata: dict[str, Any]) -> None:
    states = fmt.STATE_NAMES.values()
    if metadata["state"] not in states:
        raise checker.fail(f"metadata field state is {metadata['state'][:40]!r}, wanted one of {', '.join(states)}")


def _check_clocks(checker: _Checker, metadata: dict[str, Any]) -> None:
    clock = checker.get(metadata, "clock", dict)
    checker.get(clock, "name", str)
    checker.get({"id": ""} | clock, "id", str)  # older dumps have none
    per_second = checker.integer(
        clock, "ticks_per_second", ranges.MIN_TICKS_PER_SECOND, ranges.MAX_TICKS_PER_SECOND + 1
    )
    checker.integer(clock, "resolution_ticks", 1, per_second + 1)
    checker.integer(clock, "shift", 0, 32)
    host_time = checker.get({"host_time": {}} | metadata, "host_time", dict)  # older dumps have none
    checker.get({"id": ""} | host_time, "id", str)
    checker.integer({"anchor_ns": 0} | host_time, "anchor_ns", -fmt.MAX_NS, fmt.MAX_NS + 1)


def _check_overhead(checker: _Checker, metadata: dict[str, Any]) -> None:
    """Checks the ns of a span by warps per SM; older dumps have none."""
    costs = metadata.get("overhead_ns", {})
    pairs = costs.items() if isinstance(costs, dict) else [("", None)]
    for warps, cost in pairs:
        known = warps.isascii() and warps.isdigit() and len(warps) < 5
        if not known or not isinstance(cost, int | float) or not 0 <= cost < 1e9:
            raise checker.fail(f"metadata field overhead_ns is {str(costs)[:40]}, wanted ns by warps per SM")


def _check_sinks(checker: _Checker, metadata: dict[str, Any]) -> None:
    """Checks the memories that records went to, by kernel; older dumps have none."""
    sinks = metadata.get("sinks", {})
    if not isinstance(sinks, dict) or not all(
        isinstance(found, list) and set(map(str, found)) <= {"host", "device"} for found in sinks.values()
    ):
        raise checker.fail(f"metadata field sinks is {str(sinks)[:40]}, wanted 'host' or 'device' by kernel")


def _check_tables(checker: _Checker, metadata: dict[str, Any]) -> None:
    for table in checker.get(metadata, "event_tables", list):
        checker.get(table, "name", str)
        events = checker.get(table, "events", list)
        if len(events) > fmt.MAX_EVENTS:
            raise checker.fail(
                f"event table {table['name']!r} has {len(events)} events, wanted at most {fmt.MAX_EVENTS}"
            )
        for event in events:
            for key in EVENT_KEYS:
                checker.get(event, key, str)
        _check_names(checker, table.get("left_out", []), "left_out")
    for table in checker.get(metadata, "role_tables", list):
        _check_names(checker, table)


def _check_names(checker: _Checker, names: Any, what: str = "roles") -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise checker.fail(f"{what} are not a list of names")


def _launch(checker: _Checker, metadata: dict[str, Any], entry: Any) -> LaunchSection:
    values: dict[str, Any] = {"name": checker.get(entry, "name", str)}
    entry = _LAUNCH_OPTIONAL | entry
    values["key"] = checker.get(entry, "key", str)
    for key in _LAUNCH_INTEGERS:
        value = entry.get(key)
        if type(value) is not int or not 0 <= value < _INT_LIMIT:  # inline, as there may be thousands of launches
            value = checker.integer(entry, key, -_INT_LIMIT if key == "stream" else 0)
        values[key] = value
    launch = LaunchSection(**values)
    for table, idx in (("event_tables", launch.event_table), ("role_tables", launch.role_table)):
        if idx >= len(metadata[table]):
            raise checker.fail(f"launch {launch.launch_idx} names table {idx} of {len(metadata[table])} {table}")
    return launch


def _check_range(checker: _Checker, name: str, offset: int, num_bytes: int, payload_bytes: int) -> None:
    if offset % fmt.ALIGNMENT or offset + num_bytes > payload_bytes:
        raise checker.fail(f"{name} {offset} with {num_bytes} bytes does not fit the payload of {payload_bytes}")
