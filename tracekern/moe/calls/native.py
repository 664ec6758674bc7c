"""The compiled part of a family of kernels, on either backend."""

from __future__ import annotations

from typing import Any

from tracekern.compiled import compiled


class NativeFamily:
    """A family on the CPU backend, which has the facts for all; csrc/moe/bind.hpp says what they are.

    It is loaded when something is first asked of it, and built before that in a checkout.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(compiled(self._name), name)


def native_family(name: str, backend: str) -> Any:
    """Returns the family on a backend."""
    if backend == "cuda":
        from tracekern import _cuda

        return _cuda.families[name]
    return compiled(name)
