"""Names that DeepEP's users import from deep_ep.utils."""

from __future__ import annotations

from tracekern.moe.calls.deepep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
