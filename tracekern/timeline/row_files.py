"""Rows of a table in a file: a column after the other, each in as few bytes as its numbers need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput

_UNFINISHED = ".part"


@dataclass(frozen=True)
class _Column:
    offset: int
    """Of its first byte in the file."""
    stored: str
    """Type of what was written, which is how far the numbers are above the lowest; "" where all are equal."""
    lowest: int
    dtype: str


@dataclass(frozen=True)
class RowFile:
    """[n] integers of several columns in a file."""

    path: Path
    count: int
    columns: dict[str, _Column]

    @classmethod
    def write(cls, path: Path, columns: Mapping[str, npt.NDArray[Any]]) -> RowFile:
        """Writes the file under another name, which it keeps until it is whole.

        Raises BadInput where there is no room for it.
        """
        unfinished = path.with_name(path.name + _UNFINISHED)
        written: dict[str, _Column] = {}
        try:
            with unfinished.open("wb") as file:
                for name, values in columns.items():
                    above, lowest = _above_lowest(values)
                    stored = "" if above is None else above.dtype.str
                    written[name] = _Column(file.tell(), stored, lowest, values.dtype.str)
                    if above is not None:
                        above.tofile(file)
            os.replace(unfinished, path)
        except OSError as error:
            raise BadInput(
                f"{path}: cannot be written ({error}); name a scratch folder, TMPDIR, with more room"
            ) from None
        finally:
            unfinished.unlink(missing_ok=True)
        return cls(path, max(map(len, columns.values()), default=0), written)

    def read(self, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """[stop - start] of each column; all rows without the two."""
        stop = self.count if stop is None else stop
        if start == stop:
            return {name: np.empty(0, column.dtype) for name, column in self.columns.items()}
        with self.path.open("rb") as file:
            return {name: _read(file, column, start, stop) for name, column in self.columns.items()}


def _above_lowest(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any] | None, int]:
    """([n] how far each number is above the lowest, None where none is; the lowest)"""
    if not len(values):
        return None, 0
    lowest, highest = int(values.min()), int(values.max())
    if lowest == highest:
        return None, lowest
    # In numbers without a sign differences are right, however far apart the ends are.
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    above = values.view(unsigned) - _modulo(lowest, unsigned)
    return above.astype(np.min_scalar_type(highest - lowest), copy=False), lowest


def _modulo(number: int, unsigned: np.dtype[Any]) -> Any:
    return unsigned.type(number % (1 << 8 * unsigned.itemsize))


def _read(file: Any, column: _Column, start: int, stop: int) -> npt.NDArray[Any]:
    dtype = np.dtype(column.dtype)
    if not column.stored:
        return np.full(stop - start, column.lowest, dtype)
    stored, unsigned = np.dtype(column.stored), np.dtype(f"u{dtype.itemsize}")
    file.seek(column.offset + start * stored.itemsize)
    values = np.fromfile(file, stored, stop - start).astype(unsigned)
    values += _modulo(column.lowest, unsigned)
    return values.view(dtype)
