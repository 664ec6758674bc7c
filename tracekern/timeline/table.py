"""Table: the base of what has columns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

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
