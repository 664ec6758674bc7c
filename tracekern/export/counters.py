"""The counters of a run whose parts are read one by one: their steps lie in files, and one counter is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracekern.export.windows import Windows
from tracekern.timeline.facts.counters import Counter, CounterSteps, find_steps
from tracekern.timeline.row_files import RowFile


class CountersOnDisk(Sequence[Counter]):
    """Those that count_events() finds in all parts together. Each is put together whenever it is asked for."""

    def __init__(self, windows: Windows, folder: Path) -> None:
        """folder: for files that take some 5 bytes a step."""
        self._about: dict[Any, CounterSteps] = {}
        """By order; without steps."""
        self._pieces: dict[Any, list[tuple[RowFile, int, int]]] = {}
        """By order, where its steps are: file, begin and end."""
        for number in range(len(windows)):
            self._keep(find_steps(windows.part(number)), folder / f"{number:05d}.counters")
        self._orders = sorted(self._about)

    def _keep(self, steps: list[CounterSteps], path: Path) -> None:
        if not steps:
            return
        columns = {name: np.concatenate([getattr(own, name) for own in steps]) for name in ("time", "change")}
        file, first = RowFile.write(path, columns), 0
        for own in steps:
            last, none = first + len(own.time), np.empty(0, np.int64)
            about = CounterSteps(own.rank, own.name, own.unit, own.place, none, none)
            self._about.setdefault(own.order, about)
            self._pieces.setdefault(own.order, []).append((file, first, last))
            first = last

    def __len__(self) -> int:
        return len(self._orders)

    def __getitem__(self, number: Any) -> Any:
        order = self._orders[number]
        about = self._about[order]
        parts = [file.read(first, last) for file, first, last in self._pieces[order]]
        time, change = (np.concatenate([part[name] for part in parts]) for name in ("time", "change"))
        return CounterSteps(about.rank, about.name, about.unit, about.place, time, change).counter()
