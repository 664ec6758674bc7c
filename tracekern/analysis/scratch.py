"""Objects in files of a scratch folder. Their arrays are mapped, not read; what several objects share is written once.

A file is its pickle and then its arrays. An array that was mapped from another file is not written again: it stays a
view of that file. Files are written under another name and renamed, so that one that is there is whole.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import mmap
import pickle
import struct
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tracekern.errors import BadInput
from tracekern.files import atomic_file

_ALIGNMENT = 64
_HEAD = struct.Struct("<QQ")
"""Bytes of the pickle, and how many arrays follow."""


class Scratch:
    """The files of one folder, as one process sees them; scratch_of() makes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: dict[str, tuple[int, int, weakref.ref[mmap.mmap]]] = {}
        """File -> where it lies in memory: begin and end."""
        self._shared: dict[str, Any] = {}
        self._name_of: dict[int, tuple[str, Any]] = {}
        """By the id of a shared value, which is kept alive so that no other one gets it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return scratch_of, (self.folder,)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def key(self, *values: Any) -> str:
        """Names values by their content."""
        return hashlib.sha256(self.pickled(values)).hexdigest()[:32]

    def share(self, value: Any) -> Any:
        """Writes a value once for all objects that hold it. Returns it."""
        if id(value) not in self._name_of:
            parts = self._parts_of(value)
            content = hashlib.sha256()
            for part in parts:
                content.update(part)
            name = f"shared_{content.hexdigest()[:32]}"
            if not self.has(name):
                self._write(name, *parts)
            self._shared[name], self._name_of[id(value)] = value, (name, value)
        return value

    def save(self, name: str, value: Any) -> None:
        """Raises BadInput where there is no room."""
        self._write(name, *self._parts_of(value))

    def _parts_of(self, value: Any) -> list[Any]:
        """The pickle, and the bytes of each array."""
        arrays = list[pickle.PickleBuffer]()
        data = self.pickled(value, arrays.append)
        return [data, *(array.raw() for array in arrays)]

    def _write(self, name: str, data: bytes, *views: memoryview) -> None:
        with _new_file(self.folder / name) as file:
            file.write(_HEAD.pack(len(data), len(views)))
            file.write(struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views)))
            file.write(data)
            for view in views:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                file.write(view)

    def load(self, name: str) -> Any:
        """Reads what save() wrote. Arrays are read-only."""
        mapped = memoryview(self._map(name))
        size, count = _HEAD.unpack_from(mapped)
        at = _HEAD.size + 8 * count
        sizes = struct.unpack_from(f"<{count}Q", mapped, _HEAD.size)
        data, at = mapped[at : at + size], at + size
        views = list[memoryview]()
        for length in sizes:
            at += -at % _ALIGNMENT
            views.append(mapped[at : at + length])
            at += length
        return _Unpickler(io.BytesIO(data), self, views).load()

    def pickled(self, value: Any, take_array: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
        """take_array: takes those that are to be written behind the pickle; without it they are in it."""
        file = io.BytesIO()
        _Pickler(file, self, take_array).dump(value)
        return file.getvalue()

    def unpickled(self, data: bytes) -> Any:
        return _Unpickler(io.BytesIO(data), self, []).load()

    def place_of(self, value: Any) -> tuple[Any, ...] | None:
        """Returns where a shared value, or a mapped array, is to be found; None of any other."""
        if known := self._name_of.get(id(value)):
            return known[:1]
        if isinstance(value, np.ndarray) and value.nbytes:
            begin = value.__array_interface__["data"][0]
            for name, (first, stop, mapped) in self._mapped.items():
                if first <= begin < stop and mapped() is not None:
                    return name, begin - first, value.dtype.str, value.shape, value.strides
        return None

    def find(self, name: str, at: int = 0, dtype: str = "", *layout: tuple[int, ...]) -> Any:
        """Returns what lies at a place."""
        if dtype:
            shape, strides = layout
            return np.ndarray(shape, dtype, self._map(name), at, strides)
        if name not in self._shared:
            self._shared[name] = value = self.load(name)
            self._name_of[id(value)] = name, value
        return self._shared[name]

    def _map(self, name: str) -> mmap.mmap:
        if name in self._mapped and (known := self._mapped[name][2]()) is not None:
            return known
        with (self.folder / name).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        gone = functools.partial(self._mapped.pop, name, None)
        self._mapped[name] = begin, begin + len(mapped), weakref.ref(mapped, lambda _: gone())
        return mapped


_KNOWN: dict[Path, Scratch] = {}


def scratch_of(folder: Path) -> Scratch:
    """Returns the only one of this process for a folder, until forget()."""
    return _KNOWN.setdefault(folder, Scratch(folder))


def forget(folder: Path) -> None:
    """Lets go of what a folder held that is removed: another one may come under the same name."""
    _KNOWN.pop(folder, None)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    try:
        with atomic_file(path) as file:
            yield file
    except BadInput as error:
        raise BadInput(f"{error}; make room, or set TMPDIR to a folder that has more") from None


class _Pickler(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, scratch: Scratch, take_array: Callable[[pickle.PickleBuffer], Any] | None
    ) -> None:
        super().__init__(file, 5, buffer_callback=take_array)
        self._scratch = scratch

    def persistent_id(self, value: Any) -> Any:
        return self._scratch.place_of(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, scratch: Scratch, arrays: list[memoryview]) -> None:
        super().__init__(file, buffers=arrays)
        self._scratch = scratch

    def persistent_load(self, place: Any) -> Any:
        return self._scratch.find(*place)
