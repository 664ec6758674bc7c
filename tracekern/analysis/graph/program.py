"""What a run's launches say of it, before any span is looked at: stages, who is compared in each, possible phases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.waits.analyze import Phase
from tracekern.formatting import brief
from tracekern.timeline.facts.stages import stages_of
from tracekern.timeline.model import Int32, Int64, Mask, Timeline

BETWEEN_SPANS = "(between spans)"
"""Event name of the phase that holds what a run did between its spans, and after the last."""
NOT_STARTED = "(not started)"
"""Event name of the phase that holds the time of a launch before a run's first record."""


@dataclass(frozen=True)
class Program:
    """Alike in all parts of a run. Its launches are those of the Timeline, then one a rank for device spans that name
    none."""

    rank_of_launch: Int32
    stage_of_launch: Int32
    """[num_launches] index into `stages`."""
    sequence: Int64
    """[num_launches]"""
    stream: Int32
    """[num_launches] number of its (rank, stream)."""
    place_of_launch: Int64
    """[num_launches] index of its rank into Timeline.ranks."""
    nameless: Int32
    """[num_tracks] the launch of a track's device spans that name none."""
    stages: tuple[str, ...]
    """The last is that of no launch."""
    has_rank: Mask
    """[num_stages, num_ranks] Whether the rank is one of those that are compared with each other in the stage."""
    island: Int64
    """[num_ranks] see Stages."""
    phases: tuple[Phase, ...]
    """By stage, and by `names`: all that any span may be of."""
    number_of_event: Int32
    """[num_events] place of each event's name among those of a stage's phases."""

    __repr__ = brief

    @classmethod
    def of(cls, timeline: Timeline) -> Program:
        launches, ranks, stages = timeline.launches, timeline.ranks, stages_of(timeline)
        place = {rank.rank: idx for idx, rank in enumerate(ranks)}
        rank = np.array([*(entry.rank for entry in launches), *(entry.rank for entry in ranks)], np.int32)
        owners = [(launch.rank, launch.stream) for launch in launches] + [(entry.rank, -1) for entry in ranks]
        keys = {key: idx for idx, key in enumerate(sorted(set(owners)))}
        names = tuple(dict.fromkeys([*(event.name for event in timeline.events), BETWEEN_SPANS, NOT_STARTED]))
        number = {name: idx for idx, name in enumerate(names)}
        return cls(
            rank,
            np.append(stages.of_launch, np.full(len(ranks), len(stages.names), np.int32)),
            np.array([*(launch.sequence for launch in launches), *[0] * len(ranks)], np.int64),
            np.array([keys[key] for key in owners], np.int32),
            np.array([place[number] for number in rank.tolist()], np.int64),
            np.array([len(launches) + place[track.rank] for track in timeline.tracks], np.int32),
            (*stages.names, ""),
            np.append(stages.has_rank, np.ones((1, len(ranks)), bool), axis=0),
            stages.island,
            tuple(Phase(stage, name) for stage in (*stages.names, "") for name in names),
            np.array([number[event.name] for event in timeline.events] or [0], np.int32),
        )

    @property
    def num_launches(self) -> int:
        return len(self.rank_of_launch)

    @property
    def num_names(self) -> int:
        """How many phases each stage has."""
        return len(self.phases) // len(self.stages)

    @property
    def between_spans(self) -> Int32:
        """[num_stages] the BETWEEN_SPANS phase of each stage."""
        return np.arange(self.num_names - 2, len(self.phases), self.num_names, dtype=np.int32)

    @property
    def not_started(self) -> Int32:
        """[num_stages] the NOT_STARTED phase of each stage."""
        return np.arange(self.num_names - 1, len(self.phases), self.num_names, dtype=np.int32)

    @property
    def island_of_launch(self) -> Int64:
        """[num_launches] that of its rank."""
        return self.island[self.place_of_launch]
