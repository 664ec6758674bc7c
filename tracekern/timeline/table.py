"""Table: the base of what has columns. Columns of tuples of records, worked out once for all that share these."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tracekern.formatting import brief

AnyTable = TypeVar("AnyTable", bound="Table")


@dataclass(frozen=True, repr=False)
class Table:
    """Fields that are arrays are columns of one length, the first one among them."""

    __repr__ = brief

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def take(self: AnyTable, which: Any) -> AnyTable:
        """Returns the rows that an index array, mask or slice picks."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[which] for name, value in values.items() if isinstance(value, np.ndarray)})


_KEPT = 8
_known: list[tuple[tuple[Any, ...], str, npt.NDArray[np.int32]]] = []


def shared_column(records: tuple[Any, ...], name: str) -> npt.NDArray[np.int32]:
    """[n] one attribute of all records. Kept for the latest tuples, and read-only: the parts of a run share them."""
    for table, known, column in tuple(_known):
        if table is records and known == name:
            return column
    column = np.array([getattr(record, name) for record in records], np.int32)
    column.flags.writeable = False
    _known.insert(0, (records, name, column))
    del _known[_KEPT:]
    return column
