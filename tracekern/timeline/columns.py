"""Joining Spans or Marks of several parts into one."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import numpy as np

from tracekern.timeline.model import Marks, Spans

Rows = TypeVar("Rows", Spans, Marks)


def join_rows(parts: list[Rows], empty: Rows) -> Rows:
    """The rows of all parts, one after the other. Empties `parts`, column by column, to keep the peak of memory low."""
    if len(parts) < 2:
        return parts.pop() if parts else empty
    columns: list[dict[str, Any]] = [
        {field.name: getattr(part, field.name) for field in dataclasses.fields(part)} for part in parts
    ]
    kind = type(parts[0])
    parts.clear()
    return kind(**{name: np.concatenate([column.pop(name) for column in columns]) for name in list(columns[0])})
