"""Waits summed up by rank, phase, role and peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import Groups, group_rows
from tracekern.analysis.waits.analyze import CLASSES, Phase, Waits
from tracekern.timeline.model import Float64, Int64

KEYS = ("rank", "phase", "role", "peer")


@dataclass(frozen=True)
class WaitStatistic:
    """The waits that agree in the keys asked for; the other keys are None."""

    rank: int | None
    phase: Phase | None
    role: str | None
    peer: int | None
    """-1 where it is not known whom the waits were for."""
    count: int
    num_headless: int
    """Waits whose begin a flight recorder overwrote: they took longer than is on record."""
    num_endless: int
    """Waits that never ended. They count as long as is known."""
    sum_ns: int
    max_warp_ns: int
    """The largest sum of a single warp."""
    p50_ns: float
    p99_ns: float
    """Quantiles over single waits that are not headless, linear between them; nan where there is none."""
    by_class: dict[str, int]
    """waits.CLASSES -> ns; they add up to sum_ns."""
    wrong_order_ns: int
    slack_ns: int


def wait_statistics(waits: Waits, by: Sequence[str] = KEYS) -> tuple[WaitStatistic, ...]:
    """One row for each group of waits that agree in the keys `by`, largest sum first.

    Raises ValueError for a key that is not in KEYS.
    """
    if unknown := sorted(set(by) - set(KEYS)):
        raise ValueError(f"no key {unknown[0]!r}; wanted some of {', '.join(KEYS)}")
    groups = group_rows(len(waits), *(getattr(waits, key) for key in by))
    if not len(waits):
        return ()
    keys = dict(zip(by, groups.columns, strict=True))
    sums, counts, headless = groups.sum(waits.wait_ns), groups.count(), groups.sum(waits.headless)
    endless = groups.sum(waits.endless)
    warps = group_rows(len(waits), groups.group, waits.track)
    of_warp = np.full(len(groups), 0, np.int64)
    np.maximum.at(of_warp, warps.columns[0], warps.sum(waits.wait_ns))
    whole = Groups(groups.group[~waits.headless], groups.columns)
    p50, p99 = _quantiles(whole, waits.wait_ns[~waits.headless], (0.5, 0.99))
    by_class = {name: groups.sum(values) for name, values in waits.by_class().items()}
    wrong_order, slack = groups.sum(waits.wrong_order_ns), groups.sum(waits.slack_ns)
    return tuple(
        WaitStatistic(
            rank=int(keys["rank"][i]) if "rank" in keys else None,
            phase=waits.phases[keys["phase"][i]] if "phase" in keys else None,
            role=waits.roles[keys["role"][i]] if "role" in keys else None,
            peer=int(keys["peer"][i]) if "peer" in keys else None,
            count=int(counts[i]),
            num_headless=int(headless[i]),
            num_endless=int(endless[i]),
            sum_ns=int(sums[i]),
            max_warp_ns=int(of_warp[i]),
            p50_ns=float(p50[i]),
            p99_ns=float(p99[i]),
            by_class={name: int(by_class[name][i]) for name in CLASSES},
            wrong_order_ns=int(wrong_order[i]),
            slack_ns=int(slack[i]),
        )
        for i in np.lexsort((np.arange(len(groups)), -sums)).tolist()
    )


def _quantiles(groups: Groups, values: Int64, wanted: Sequence[float]) -> list[Float64]:
    """[num_groups] for each wanted quantile: linear between the two nearest values; nan for a group without values."""
    ordered = _sort_within(groups, values)
    filled = np.flatnonzero(groups.count())
    count = groups.count()[filled]
    first = np.cumsum(count) - count
    found = [np.full(len(groups), np.nan) for _ in wanted]
    for quantile, share in zip(found, wanted, strict=True):
        place = share * (count - 1)
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, count - 1)
        low, high = ordered[first + below], ordered[first + above]
        quantile[filled] = low + (high - low) * (place - below)
    return found


def _sort_within(groups: Groups, values: Int64) -> Int64:
    """The values (0 or more), group after group, each ascending."""
    room = int(values.max(initial=0)) + 1
    if len(groups) * room >= 1 << 62:
        return values[np.lexsort((values, groups.group))]
    packed = groups.group * room + values  # one sort of numbers takes a tenth of a sort of indices by two keys
    packed.sort()
    return packed % room
