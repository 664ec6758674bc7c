"""Where exporters write: a file that is whole or not there, compressed by threads where its name says so."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Protocol

from tracekern.files import atomic_file

COMPRESSION_THREADS = 2
GZIP_LEVEL = 1
_GZIP_HEADER = bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 255])  # deflate, no name, no time: equal input gives equal files
_EMPTY_FINAL_BLOCK = b"\x03\x00"

Bytes = bytes | bytearray | memoryview


class Output(Protocol):
    def write(self, data: Bytes) -> None:
        """Takes `data`; it must not change before flush()."""

    def flush(self) -> None: ...


class PlainSink:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: Bytes) -> None:
        self._file.write(data)

    def flush(self) -> None:
        pass


class GzipSink:
    """One gzip member made of pieces deflated side by side; zlib leaves the interpreter lock while it works."""

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self._file = file
        self._pool = pool
        self._pending: deque[tuple[Future[bytes], Bytes]] = deque()
        self._crc = 0
        self._size = 0
        file.write(_GZIP_HEADER)

    def write(self, data: Bytes) -> None:
        self._pending.append((self._pool.submit(_deflate, data), data))
        while len(self._pending) > COMPRESSION_THREADS:
            self._write_oldest()

    def flush(self) -> None:
        while self._pending:
            self._write_oldest()

    def finish(self) -> None:
        self.flush()
        self._file.write(_EMPTY_FINAL_BLOCK + struct.pack("<II", self._crc, self._size & 0xFFFFFFFF))

    def _write_oldest(self) -> None:
        deflated, data = self._pending.popleft()
        self._file.write(deflated.result())
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)


def _deflate(data: Bytes) -> bytes:
    compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    # A sync flush ends on a byte: pieces can be put one after the other.
    return compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)


@contextlib.contextmanager
def open_output(path: str | os.PathLike[str], through_link: bool = True) -> Iterator[Output]:
    """Writes `path` atomically, through gzip when its name ends in .gz. Raises BadInput when it cannot be written.

    through_link: as of atomic_file().
    """
    with atomic_file(path, through_link) as file:
        if not str(path).endswith(".gz"):
            yield PlainSink(file)
            return
        with ThreadPoolExecutor(COMPRESSION_THREADS, thread_name_prefix="gzip") as pool:
            sink = GzipSink(file, pool)
            yield sink
            sink.finish()
