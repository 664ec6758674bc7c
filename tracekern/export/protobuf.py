"""Perfetto packets that are few: descriptors, interned names, metadata. The many are written by csrc/encode."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tracekern.timeline.model import Int64

EXPLICIT_ORDER = 3
MERGE_NONE = 2
_NEEDED, _CLEARED_AND_NEEDED = 2, 3
_PADDED_BYTES = 10  # of a varint of 64 bits


class Interned(enum.IntEnum):
    """Field numbers of InternedData."""

    CATEGORY = 1
    EVENT_NAME = 2
    ANNOTATION_NAME = 3
    ANNOTATION_STRING = 29


_EVERY = -1


class Interner:
    """Numbers for strings, from 1, the same in all sequences of packets. A sequence names only those that it needs."""

    def __init__(self) -> None:
        self._texts: dict[Interned, list[str]] = {kind: [] for kind in Interned}
        self._iids: dict[tuple[Interned, str], int] = {}
        self._needed: dict[tuple[Interned, int], set[int]] = {}
        """By kind and sequence, what is still to be named."""
        self._named: dict[tuple[Interned, int], set[int]] = {}

    def iid(self, kind: Interned, text: str, sequence: int = _EVERY) -> int:
        """The number of `text`, which `sequence` needs; without one, all do."""
        iid = self.number(kind, text)
        self.need(kind, [iid], sequence)
        return iid

    def number(self, kind: Interned, text: str) -> int:
        """The number of `text`. No sequence needs it yet."""
        if (kind, text) not in self._iids:
            self._iids[kind, text] = self.first_iid(kind, [text])
        return self._iids[kind, text]

    def first_iid(self, kind: Interned, texts: Sequence[str]) -> int:
        """The number of the first of `texts`; the others follow it one by one. No sequence needs them yet."""
        first = len(self._texts[kind]) + 1
        self._texts[kind].extend(texts)
        return first

    def need(self, kind: Interned, iids: Iterable[int], sequence: int) -> None:
        self._needed.setdefault((kind, sequence), set()).update(iids)

    @property
    def sequences(self) -> list[int]:
        """Those that need what they have not named."""
        return sorted({sequence for (_, sequence), iids in self._needed.items() if iids} - {_EVERY})

    def encode(self, sequence: int) -> bytes:
        """What `sequence` needs and has not named so far."""
        entries = []
        for kind, texts in self._texts.items():
            named = self._named.setdefault((kind, sequence), set())
            needed = self._needed.get((kind, _EVERY), set()) | self._needed.pop((kind, sequence), set())
            for iid in sorted(needed - named):
                entries.append(message(kind, varint_field(1, iid) + text_field(2, texts[iid - 1])))
            named |= needed
        return b"".join(entries)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_field(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def text_field(number: int, text: str) -> bytes:
    # A lone surrogate in a name must not lose the trace.
    return message(number, text.encode("utf-8", "replace"))


def packet(content: bytes, sequence: int) -> bytes:
    return message(1, content + varint_field(10, sequence))


def interned_data(interner: Interner, sequence: int) -> bytes:
    """The packet that starts a sequence: clears its state and names what its events will refer to."""
    return packet(message(12, interner.encode(sequence)) + varint_field(13, _CLEARED_AND_NEEDED), sequence)


def more_interned_data(interner: Interner, sequence: int) -> bytes:
    """A packet on the way that names what further events of the sequence will refer to."""
    return packet(message(12, interner.encode(sequence)) + varint_field(13, _NEEDED), sequence)


def track_descriptor(uuid: int, name: str, parent_uuid: int, order: int, sequence: int) -> bytes:
    """A row `name`, `order`-th below its parent. Its own children keep their order and are never merged by name."""
    content = varint_field(1, uuid) + text_field(2, name)
    if parent_uuid:
        content += varint_field(5, parent_uuid)
    content += varint_field(11, EXPLICIT_ORDER) + varint_field(12, order) + varint_field(15, MERGE_NONE)
    return packet(message(60, content), sequence)


def counter_descriptor(uuid: int, name: str, unit: str, parent_uuid: int, order: int, sequence: int) -> bytes:
    """A row `name` that shows numbers over time."""
    content = varint_field(1, uuid) + text_field(2, name) + varint_field(5, parent_uuid)
    content += message(8, text_field(6, unit)) + varint_field(12, order) + varint_field(15, MERGE_NONE)
    return packet(message(60, content), sequence)


def counter_packets(uuid: int, time: Int64, value: Int64, sequence: int) -> bytes:
    """A packet for each point [n] of a counter. Padded varints make all of one size: one table of bytes."""
    event_head = varint_field(9, 4) + varint_field(11, uuid) + varint(30 << 3)
    event_bytes = len(event_head) + _PADDED_BYTES
    tail = varint_field(10, sequence)
    head = varint(8 << 3)
    packet_bytes = len(head) + _PADDED_BYTES + 2 + event_bytes + len(tail)  # 2: tag and length of the event
    fixed = (bytes([1 << 3 | 2, packet_bytes]) + head, bytes([11 << 3 | 2, event_bytes]) + event_head, tail)
    before, between, after = (np.tile(np.frombuffer(part, np.uint8), (len(time), 1)) for part in fixed)
    table = [before, _padded_varints(time), between, _padded_varints(value), after]
    return np.concatenate(table, axis=1).tobytes()


def _padded_varints(values: Int64) -> npt.NDArray[np.uint8]:
    """[n, _PADDED_BYTES] seven bits a byte, lowest first; all but the last say that more follows."""
    shifts = np.arange(_PADDED_BYTES, dtype=np.uint64) * np.uint64(7)
    digits: npt.NDArray[np.uint8] = (values.astype(np.uint64)[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    digits[:, :-1] |= np.uint8(0x80)
    return digits


def text_annotation(name: str, value: str) -> bytes:
    return message(4, text_field(10, name) + text_field(6, value))


def interned_annotation(name_iid: int, *, value: int | None = None, text_iid: int | None = None) -> bytes:
    content = varint_field(1, name_iid)
    if value is not None:
        content += varint_field(4, value)
    if text_iid is not None:
        content += varint_field(17, text_iid)
    return message(4, content)


def slice_packets(uuid: int, start: int, end: int, name: str, arguments: dict[str, str], sequence: int) -> bytes:
    """A span with inline names."""
    annotations = b"".join(text_annotation(key, value) for key, value in arguments.items())
    begin = varint_field(9, 1) + varint_field(11, uuid) + text_field(23, name) + annotations
    finish = varint_field(9, 2) + varint_field(11, uuid)
    return packet(varint_field(8, start) + message(11, begin), sequence) + packet(
        varint_field(8, end) + message(11, finish), sequence
    )


def instant_packet(uuid: int, time: int, name: str, category: str, arguments: dict[str, str], sequence: int) -> bytes:
    """An instant with inline names."""
    annotations = b"".join(text_annotation(key, value) for key, value in arguments.items())
    event = varint_field(9, 3) + varint_field(11, uuid) + text_field(22, category) + text_field(23, name) + annotations
    return packet(varint_field(8, time) + message(11, event), sequence)
