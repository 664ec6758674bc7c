"""Waits summed up by rank, phase, role and peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.partial import About, Counts, Partial, Sums
from tracekern.analysis.waits.analyze import CLASSES, Phase, PhaseNumbers, Waits

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


@dataclass(frozen=True)
class WaitTotals(Partial):
    """How many waits there are, in some parts of a run, and how long they took."""

    waited_ns: int
    unmatched_ns: int
    """How long those took that nothing on record ended."""
    endless_ns: int
    num_endless: int
    num_open: int

    @classmethod
    def of(cls, waits: Waits) -> WaitTotals:
        return cls(
            int(waits.wait_ns.sum()),
            int(waits.unmatched.sum()),
            int(waits.wait_ns[waits.endless].sum()),
            int(waits.endless.sum()),
            waits.num_open,
        )


@dataclass(frozen=True)
class WaitSums(Partial):
    """What statistics of waits are made of."""

    by: About[tuple[str, ...]]
    """Some of KEYS."""
    sums: Sums
    of_warps: Sums
    """The same keys, and the track."""
    durations: Counts
    """How long waits took that are not headless."""

    @classmethod
    def of(cls, waits: Waits, by: Sequence[str] = KEYS) -> WaitSums:
        """Raises ValueError for a key that is not in KEYS."""
        if unknown := sorted(set(by) - set(KEYS)):
            raise ValueError(f"no key {unknown[0]!r}; wanted some of {', '.join(KEYS)}")
        columns = {name: getattr(waits, name) for name in by}
        if "phase" in columns:
            columns["phase"] = np.array(waits.phase_numbers, np.int64)[waits.phase]
        keys = [*columns.values()] or [np.zeros(len(waits), np.int64)]
        sums = Sums.of(
            keys,
            count=np.ones(len(waits), np.int64),
            headless=waits.headless,
            endless=waits.endless,
            ns=waits.wait_ns,
            wrong_order_ns=waits.wrong_order_ns,
            slack_ns=waits.slack_ns,
            **waits.by_class(),
        )
        of_warps = Sums.of((*keys, waits.track), ns=waits.wait_ns)
        return cls(tuple(by), sums, of_warps, Counts.of(keys, waits.wait_ns, ~waits.headless))

    def statistics(self, phases: Mapping[int, Phase] | PhaseNumbers, roles: Sequence[str]) -> tuple[WaitStatistic, ...]:
        """One row for each group of waits that agree in the keys, largest sum first.

        phases: by the number that a phase has in all parts. roles: see Waits.
        """
        sums, of_warps = self.sums, self.of_warps.largest("ns")
        p50, p99 = self.durations.quantiles((0.5, 0.99))
        keys = dict(zip(self.by, sums.keys, strict=False))
        return tuple(
            WaitStatistic(
                rank=int(keys["rank"][i]) if "rank" in keys else None,
                phase=phases[int(keys["phase"][i])] if "phase" in keys else None,
                role=roles[keys["role"][i]] if "role" in keys else None,
                peer=int(keys["peer"][i]) if "peer" in keys else None,
                count=int(sums["count"][i]),
                num_headless=int(sums["headless"][i]),
                num_endless=int(sums["endless"][i]),
                sum_ns=int(sums["ns"][i]),
                max_warp_ns=int(of_warps[i]),
                p50_ns=float(p50[i]),
                p99_ns=float(p99[i]),
                by_class={name: int(sums[name][i]) for name in CLASSES},
                wrong_order_ns=int(sums["wrong_order_ns"][i]),
                slack_ns=int(sums["slack_ns"][i]),
            )
            for i in np.lexsort((np.arange(len(sums)), -sums["ns"])).tolist()
        )


def wait_statistics(waits: Waits, by: Sequence[str] = KEYS) -> tuple[WaitStatistic, ...]:
    """One row for each group of waits that agree in the keys `by`, largest sum first.

    Raises ValueError for a key that is not in KEYS.
    """
    phases = dict(zip(waits.phase_numbers, waits.phases, strict=True))
    return WaitSums.of(waits, by).statistics(phases, waits.roles)
