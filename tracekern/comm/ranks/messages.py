"""The encoding of the small values that ranks exchange: JSON, with bytes and numpy arrays as base64.

Nothing in it can run code where it is read, unlike a pickled object.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

_BYTES, _ARRAY = "$bytes", "$array"
_KINDS = "biuf"
"""Kinds of numpy dtypes that an array may have: booleans and numbers."""


def encode(value: Any) -> bytes:
    """Returns a message. value: what JSON holds, bytes or an array of numbers, in lists, tuples and dicts.

    Raises TypeError for anything else.
    """
    return json.dumps(value, default=_as_json).encode()


def decode(message: bytes) -> Any:
    """Returns the value, with lists for tuples. Raises ValueError for what encode() does not make."""
    return json.loads(message, object_hook=_from_json)


def _as_json(value: Any) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_ARRAY: data, "dtype": value.dtype.str, "shape": value.shape}
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks; wanted JSON, bytes or an array of numbers")


def _from_json(values: dict[str, Any]) -> Any:
    if _BYTES in values:
        return base64.b64decode(values[_BYTES])
    if _ARRAY in values:
        dtype = np.dtype(str(values["dtype"]))
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of {dtype}; wanted numbers")
        return np.frombuffer(base64.b64decode(values[_ARRAY]), dtype).reshape(values["shape"]).copy()
    return values
