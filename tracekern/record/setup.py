"""Of capture()'s arguments those that say how to open it, checked before anything is opened."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from tracekern.errors import BadInput
from tracekern.record.sinks import Sink

if TYPE_CHECKING:
    from tracekern.record.device import CaptureDevice


@dataclass(frozen=True)
class Setup:
    """Raises BadInput for what cannot be used."""

    device: CaptureDevice | Literal["cpu", "cuda"]
    sink: Sink
    max_bytes: int
    host_spans: int
    clocks: bool
    load: Sequence[Callable[[], None]]

    def __post_init__(self) -> None:
        for name, value, low in (("max_bytes", self.max_bytes, 1), ("host_spans", self.host_spans, 0)):
            if not isinstance(value, Integral) or value < low:
                raise BadInput(f"{name}={value!r}: wanted a whole number of {low} or more")
        if not isinstance(self.load, Sequence) or not all(map(callable, self.load)):
            raise BadInput(f"load={self.load!r}: wanted a list of functions")


def used_device() -> Literal["cpu", "cuda"]:
    """ "cuda" where this process has used torch.cuda."""
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_initialized() else "cpu"


def list_of_names(what: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """None for None, which is all; an empty list is none. Raises BadInput for a string, whose letters nobody means."""
    if isinstance(names, str):
        raise BadInput(f"{what}={names!r}: wanted a list of names")
    return None if names is None else tuple(names)


def check_settings(settings: dict[str, Any] | None) -> None:
    """Raises BadInput for what no dump can hold."""
    if not isinstance(settings, dict | None):
        raise BadInput(f"settings={settings!r}: wanted a dict of what JSON holds")
    try:
        json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise BadInput(f"settings={settings!r}: {error}; wanted a dict of what JSON holds") from None
