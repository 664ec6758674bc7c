"""A read-only view of a segment: of a live rank's from outside, or of what a dead one left."""

from __future__ import annotations

import functools
import json
import mmap
import os
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.fault import FAULT_RECORD, FIRST_FAULT_RECORD
from tracekern.errors import BadInput
from tracekern.segment.names import open_segment, remove_segment

_View = TypeVar("_View", bound="SegmentView")


class SegmentView:
    """A mapped segment that is only read. SegmentWriter is the same for the process that records into it."""

    _access: ClassVar = mmap.ACCESS_READ
    _open_flags: ClassVar = os.O_RDONLY

    def __init__(self, name: str, file_descriptor: int, size: int) -> None:
        self.name = name
        self._fd = file_descriptor
        self._bytes = np.frombuffer(mmap.mmap(file_descriptor, size, access=self._access), np.uint8)
        self._address = int(self._bytes.ctypes.data)
        self.header: Any = self._bytes[: fmt.SEGMENT_HEADER.itemsize].view(fmt.SEGMENT_HEADER)[0]

    @classmethod
    def attach(cls: type[_View], name: str) -> _View:
        """Opens a segment of another process. Raises BadInput if it is missing, of another user or not a segment."""
        try:
            fd = open_segment(name, cls._open_flags)
        except OSError as error:
            raise BadInput(f"segment {name}: cannot be opened ({error.strerror}); is the run over?") from None
        size = os.fstat(fd).st_size
        if size < fmt.SEGMENT_HEADER.itemsize:
            os.close(fd)
            raise BadInput(
                f"segment {name}: {size} bytes, wanted at least {fmt.SEGMENT_HEADER.itemsize}; its rank died early"
            )
        segment = cls(name, fd, size)
        try:
            segment._check(size)
        except BadInput:
            segment.close()
            raise
        return segment

    def close(self) -> None:
        """Give the file descriptor back. The mapping lives as long as arrays into it do."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def unlink(self) -> None:
        """Remove the name; the memory is freed with the last mapping."""
        remove_segment(self.name)

    @property
    def address(self) -> int:
        """Address of the segment in this process."""
        return self._address

    @property
    def fault_record(self) -> npt.NDArray[Any]:
        """[1] FAULT_RECORD, where the first wait that gives up writes what it waited for.

        In a segment that an earlier version made it is a FIRST_FAULT_RECORD.
        """
        layout = FAULT_RECORD if self.header["fault_bytes"] else FIRST_FAULT_RECORD
        return self._view(int(self.header["fault_offset"]), layout, 1)

    @property
    def metadata(self) -> dict[str, Any]:
        offset, length = int(self.header["metadata_offset"]), int(self.header["metadata_bytes"])
        return self._json(offset, length)  # type: ignore[no-any-return]

    @property
    def anchor_ns(self) -> int:
        """What its rank adds to CLOCK_MONOTONIC for host time (tracekern/host_clock.py)."""
        return int(dict(self.metadata.get("host_time", {})).get("anchor_ns", 0))  # 0: of an earlier version

    @property
    def footprint_bytes(self) -> int:
        """Bytes of the segment in use, without the mirror and what is reserved beyond them."""
        parts = (("launches", fmt.LAUNCH_ENTRY), ("samples", fmt.CLOCK_SAMPLE), ("host_spans", fmt.HOST_SPAN))
        used = sum(int(self.header[f"num_{part}"]) * dtype.itemsize for part, dtype in parts)
        return int(self.header["launches_offset"]) + used + int(self.header["arena_cursor"])

    @property
    def arena_room(self) -> int:
        """Bytes of the arena that are free, a multiple of fmt.ALIGNMENT."""
        return int(self.header["arena_bytes"]) - int(self.header["arena_cursor"])

    def descriptor(self, offset: int) -> Any:
        """The LAUNCH_DESCRIPTOR of a region."""
        return self._view(offset, fmt.LAUNCH_DESCRIPTOR, 1)[0]

    def recorded_launches(self) -> list[Any]:
        """Returns the LAUNCH_ENTRY of each recorded launch, in launch order; in a graph, `sequence` is the replay's."""
        found = []
        for entry in self.launches():
            flags = int(entry["flags"])
            if flags & fmt.ENTRY_IN_GRAPH:
                region = int(entry["headers_offset"]) - fmt.LAUNCH_DESCRIPTOR.itemsize
                replay = self.descriptor(region)["replay"]
                if replay:
                    taken = entry.copy()
                    taken["sequence"] = replay - 1
                    found.append(taken)
            elif not flags & (fmt.ENTRY_COUNTED_ONLY | fmt.ENTRY_RESERVED):
                found.append(entry)
        return sorted(found, key=lambda entry: (int(entry["order"]), int(entry["sequence"])))

    def launches(self) -> npt.NDArray[Any]:
        """[num_launches] LAUNCH_ENTRY, including those that were only counted or reserved."""
        return self._view(int(self.header["launches_offset"]), fmt.LAUNCH_ENTRY, int(self.header["num_launches"]))

    def clock_samples(self) -> npt.NDArray[Any]:
        return self._view(int(self.header["samples_offset"]), fmt.CLOCK_SAMPLE, int(self.header["num_samples"]))

    def host_spans(self) -> npt.NDArray[Any]:
        return self._view(int(self.header["host_offset"]), fmt.HOST_SPAN, int(self.header["num_host_spans"]))

    def track_headers(self, entry: Any) -> npt.NDArray[Any]:
        """[num_tracks] TRACK_HEADER of a launch."""
        return self._view(int(entry["headers_offset"]), fmt.TRACK_HEADER, int(entry["num_tracks"]))

    def records(self, entry: Any) -> npt.NDArray[Any]:
        """[num_tracks, records_per_track] records of a launch."""
        num_tracks, per_track = int(entry["num_tracks"]), int(entry["records_per_track"])
        flat = self._view(int(entry["records_offset"]), fmt.WIDE_RECORD, num_tracks * per_track)
        return flat.reshape(num_tracks, per_track)

    def events(self, entry: Any) -> Any:
        """The event table of a launch, parsed."""
        return self._json(int(entry["events_offset"]), int(entry["events_bytes"]))

    def roles(self, entry: Any) -> Any:
        return self._json(int(entry["roles_offset"]), int(entry["roles_bytes"]))

    @functools.cached_property
    def words(self) -> memoryview:
        """The whole segment in words of 32 bits. A launch stores a few words, which numpy does several times slower."""
        return self._bytes.data.cast("I")

    @functools.cached_property
    def _raw(self) -> memoryview:
        return self._bytes.data

    @functools.cached_property
    def _numbers(self) -> memoryview:
        """The header in words of 64 bits; numpy takes several times as long to read a field."""
        return self._raw[: fmt.SEGMENT_HEADER.itemsize].cast("Q")

    @functools.cached_property
    def _entries_word(self) -> int:
        """Index in `words` of the first launch entry."""
        return int(self.header["launches_offset"]) // 4

    def _view(self, offset: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        stop = offset + count * dtype.itemsize
        self._check_inside(offset, stop)
        return self._bytes[offset:stop].view(dtype)

    def _check_inside(self, offset: int, stop: int) -> None:
        if offset < 0 or stop > len(self._bytes):
            raise BadInput(
                f"segment {self.name}: part at {offset}..{stop} is outside its {len(self._bytes)} bytes; damaged"
            )

    def _json(self, offset: int, length: int) -> Any:
        try:
            return json.loads(self._view(offset, np.dtype(np.uint8), length).tobytes())
        except (ValueError, RecursionError) as error:
            raise BadInput(f"segment {self.name}: text at {offset} is not JSON ({error}); damaged") from None

    def _check(self, size: int) -> None:
        header = self.header
        if bytes(header["magic"]) != fmt.SEGMENT_MAGIC:
            if not bytes(header["magic"]):
                raise BadInput(f"segment {self.name}: its rank ended before it recorded anything")
            raise BadInput(f"segment {self.name}: magic {bytes(header['magic'])!r}, wanted {fmt.SEGMENT_MAGIC!r}")
        if int(header["total_bytes"]) != size:
            raise BadInput(f"segment {self.name}: {size} bytes, its header says {header['total_bytes']}; damaged")
