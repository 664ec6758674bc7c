"""Signals and waits that did not fit, as numbers that add up over the parts of a run, and the problems they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.formatting import count as how_many
from tracekern.formatting import duration
from tracekern.timeline.model import Channel, Int64, Mask, Problem, Timeline

_ASTRAY = (
    "; {} of those would have one in a launch of another epoch or number: "
    "where the key tells calls apart, give all launches one epoch, launch(..., epoch=1)"
)


@dataclass(frozen=True)
class Lacking:
    """[n] kinds of waits in whose call nobody signalled their key."""

    key: Int64
    """[num_columns, n] ranks, communicator and key fields: all that tells ends apart but the call."""
    rank: Int64
    count: Int64

    def __add__(self, other: Lacking) -> Lacking:
        parts = [part for part in (self, other) if len(part.count)]
        if len(parts) < 2:
            return parts[0] if parts else self
        rows = np.concatenate([np.concatenate([part.key, part.rank[None]]) for part in parts], axis=1)
        rows, place = np.unique(rows, axis=1, return_inverse=True)
        count = np.zeros(rows.shape[1], np.int64)
        np.add.at(count, place.reshape(-1), np.concatenate([part.count for part in parts]))
        return Lacking(rows[:-1], rows[-1], count)


@dataclass(frozen=True)
class Repeated:
    """Keys of a call that were signalled more than once, for which no track waited as often."""

    count: int
    key: tuple[int, ...]
    """The lowest."""
    named: str
    """Its fields in words."""
    rank: int
    track: int

    def __add__(self, other: Repeated) -> Repeated:
        lowest = min(self, other, key=lambda one: one.key)
        return dataclasses.replace(lowest, count=self.count + other.count)


@dataclass(frozen=True)
class Backwards:
    """Waits that ended before their signal began, by more than the clocks of both ranks leave open."""

    count: int
    early_ns: int
    """Of the worst, as what follows."""
    key: tuple[int, ...]
    allowed_ns: float
    source: int
    destination: int
    track: int

    def __add__(self, other: Backwards) -> Backwards:
        worst = min(self, other, key=lambda one: (-one.early_ns, one.key))
        return dataclasses.replace(worst, count=self.count + other.count)


@dataclass(frozen=True)
class ChannelMisfits:
    """What did not fit on one channel."""

    unmatched: dict[int, int]
    """Rank -> closed waits without a signal on record."""
    lacking: Lacking | None
    """Of those that may have a signal in another call; None where nobody can tell, as records are gone."""
    repeated: Repeated | None
    backwards: Backwards | None

    def __add__(self, other: ChannelMisfits) -> ChannelMisfits:
        return ChannelMisfits(
            {
                rank: self.unmatched.get(rank, 0) + other.unmatched.get(rank, 0)
                for rank in sorted(self.unmatched.keys() | other.unmatched.keys())
            },
            _sum(self.lacking, other.lacking),
            _sum(self.repeated, other.repeated),
            _sum(self.backwards, other.backwards),
        )

    def problems(self, channel: Channel, is_flight: bool, astray: Mapping[int, int]) -> list[Problem]:
        """is_flight: a recorder may have kept the wait and overwritten the signal. astray: rank -> waits that would
        have a signal in another call."""
        found = [
            Problem(
                "note" if is_flight else "warning",
                "unmatched_wait",
                rank,
                -1,
                f"rank {rank}: no signal on record of {how_many(number, 'wait')} on channel {channel.name}"
                + (_ASTRAY.format(f"{astray[rank]:,}") if astray.get(rank) else ""),
                number,
            )
            for rank, number in self.unmatched.items()
        ]
        if again := self.repeated:
            text = (
                f"channel {channel.name}: {how_many(again.count, 'key')} signalled more than once, such as "
                f"{again.named} by rank {again.rank}; waits are joined to the first signal"
            )
            found.append(Problem("warning", "duplicate_signal", again.rank, again.track, text, again.count))
        if worst := self.backwards:
            text = (
                f"channel {channel.name}: {how_many(worst.count, 'wait')} over before the signal began; worst by "
                f"{duration(worst.early_ns)}, from rank {worst.source} to {worst.destination}, clocks allow "
                f"{duration(worst.allowed_ns)}"
            )
            if channel.kind.has_levels:
                text += "; do `value` and `wanted` count from the same 0?"
            found.append(Problem("error", "backwards_flow", worst.destination, worst.track, text, worst.count))
        return found


def _sum(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other


@dataclass(frozen=True)
class Misfits:
    """What did not fit on all channels, in some calls of a run."""

    channels: dict[Channel, ChannelMisfits]
    immediates: tuple[Problem, ...]
    """Of waits for immediates, all of which are in one part."""

    def __add__(self, other: Misfits) -> Misfits:
        channels = {channel: own + other.channels[channel] for channel, own in self.channels.items()}
        return Misfits(channels, self.immediates + other.immediates)

    @property
    def lacking(self) -> dict[Channel, Lacking]:
        """Channels with waits of which other calls have to be asked, and those."""
        found = {channel: own.lacking for channel, own in self.channels.items()}
        return {channel: lacking for channel, lacking in found.items() if lacking and len(lacking.count)}

    def problems(self, timeline: Timeline, is_astray: Mapping[Channel, Mask]) -> tuple[Problem, ...]:
        """is_astray: [n] of `lacking`, whether the key was signalled in any call."""
        is_flight = any(launch.records_overwritten for launch in timeline.launches)
        found, lacking = list[Problem](), self.lacking
        for channel, own in self.channels.items():
            astray: dict[int, int] = {}
            if channel in lacking:
                waits = lacking[channel]
                for rank, number in zip(
                    waits.rank[is_astray[channel]].tolist(), waits.count[is_astray[channel]].tolist(), strict=True
                ):
                    astray[rank] = astray.get(rank, 0) + number
            found += own.problems(channel, is_flight, astray)
        return (*found, *self.immediates)
