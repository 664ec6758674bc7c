"""What a training rank does to bring weights to the inference ranks: directly, or through rank 0.

Directly: each rank copies, prepares and writes its own shards, and the ranks of a group's mesh meet after it.
Through rank 0: the others write their bf16 shards to rank 0, which prepares and writes all. The same engine, slots and
stages serve both, so that what is compared is the way alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from examples.weights.model import MeshGroup, Model, make_model, values_of
from examples.weights.schedule import BF16_BYTES, RankGroup, Schedule, Write, make_schedule, shard_rows, unit_of
from examples.weights.stages import LIMIT_S, Pipeline, Slot, Stage, Work, copy_shard, prepare, write_all
from tracekern.fabric import (
    DoneCounter,
    DoneFlag,
    ImmCounter,
    MemoryRegionDescriptor,
    PeerGroupHandle,
    TransferEngine,
)

BARRIER, GATHER, CREDIT, VERSION = (number << 16 for number in range(4))
"""The first immediates of each kind: one for each group; of VERSION one for each version."""
ROOT = 0
"""Through which rank, if through one."""


@dataclass(frozen=True)
class Options:
    """One run. through_rank_0: "", or what rank 0 sends: "parts" to each its own, in a "broadcast" all to each."""

    provider: str = "tcp"
    layers: int = 4
    hidden: int = 1024
    block: int = 128
    slots: int = 3
    through_rank_0: str = ""
    num_training: ClassVar[int] = 4
    num_inference: ClassVar[int] = 2

    @property
    def model(self) -> Model:
        return make_model(self.layers, self.hidden, self.block)

    @property
    def schedule(self) -> Schedule:
        """Who writes which bytes to which inference rank."""
        if not self.through_rank_0:
            return make_schedule(self.model, self.num_training, self.num_inference)
        is_whole = self.through_rank_0 == "broadcast"
        return make_schedule(self.model.on_mesh((ROOT,)), 1, self.num_inference, is_whole)

    @property
    def num_parts(self) -> int:
        """Into which the weights are split."""
        return 1 if self.through_rank_0 == "broadcast" else self.num_inference


class Way(ABC):
    """A training rank: its parameters, its slots and its pipeline."""

    def __init__(self, rank: int, options: Options, engine: TransferEngine) -> None:
        self._rank, self._options, self._engine, self._model = rank, options, engine, options.model
        self._shards = make_schedule(self._model, options.num_training, options.num_inference).ranks[rank]
        self._first: dict[int, int] = {}
        end = 0
        for shard in self._shards:
            self._first[shard.idx] = end
            end += shard.num_elements
        self._storage = torch.zeros(max(end, 1), dtype=torch.bfloat16)
        self._groups = self._choose_groups()
        self._slots = [
            Slot(
                engine,
                max((group.num_elements for group in self._groups), default=0),
                max((group.prepared_bytes for group in self._groups), default=0),
            )
            for _ in range(options.slots)
        ]
        self._word = torch.zeros(1, dtype=torch.uint8)
        _, self._meeting_point = engine.register_tensor(self._word)
        self._pipeline = Pipeline(self._stages(), self._slots)

    @property
    def descriptors(self) -> list[MemoryRegionDescriptor]:
        """What other training ranks need: where immediates go, and the slots."""
        return [self._meeting_point, *(slot.copied_descriptor for slot in self._slots)]

    @property
    def slot_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self._slots)

    def train(self, version: int) -> None:
        """Puts the parameters of a version into this rank's storage."""
        for shard in self._shards:
            at = self._first[shard.idx]
            for weight in shard.group.weights:
                unit = unit_of(weight, self._model.block)
                for parameter in weight.parameters:
                    values = values_of(parameter, version, *shard_rows(parameter, unit, shard.group.mesh, self._rank))
                    self._storage[at : at + values.numel()].copy_(values.view(-1))
                    at += values.numel()

    def connect(self, training: list[list[MemoryRegionDescriptor]], inference: list[MemoryRegionDescriptor]) -> None:
        """Gets the descriptors of all ranks, once. A peer that is lost ends what is under way."""
        self._training, self._inference = training, inference
        self._engine.set_peer_callback(self.fail)
        self._meet()

    def send(self, version: int) -> None:
        """Brings a version to the inference ranks. It is there when each has counted all that write to it."""
        self._pipeline.send(self._groups)
        if self.is_writer:
            done = DoneCounter()
            for descriptor in self._inference:
                self._engine.submit_imm(descriptor, VERSION + version, done)
            done.wait(len(self._inference), LIMIT_S)

    def fail(self, why: str) -> None:
        self._pipeline.fail(why)

    def stop(self) -> None:
        self._pipeline.stop()

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes to inference ranks."""
        return True

    def _choose_groups(self) -> tuple[RankGroup, ...]:
        return self._options.schedule.ranks[self._rank]

    @abstractmethod
    def _meet(self) -> None: ...

    @abstractmethod
    def _stages(self) -> list[Stage]: ...

    def _copy(self, work: Work) -> None:
        copy_shard(self._storage, self._first[work.rank_group.idx], work)

    def _write(self, work: Work) -> None:
        write_all(self._engine, work.slot.prepared_handle, work.rank_group.writes, self._inference)

    def _counters(self, first: int) -> list[ImmCounter]:
        return [self._engine.make_imm_counter(first + idx) for idx in range(len(self._model.groups))]

    def _peers(self, ranks: tuple[int, ...]) -> PeerGroupHandle:
        return self._engine.add_peer_group([self._training[rank][0] for rank in ranks if rank != self._rank])

    def _raise_at(self, peers: PeerGroupHandle, imm: int) -> None:
        done = DoneFlag()
        self._engine.submit_barrier(peers, imm, timeout_s=LIMIT_S, on_done=done)
        done.wait(LIMIT_S)


class Direct(Way):
    """Writes its own shards to where inference wants them."""

    def _meet(self) -> None:
        self._meshes = {group.group.mesh: self._peers(group.group.mesh) for group in self._groups}
        self._came = self._counters(BARRIER)

    def _stages(self) -> list[Stage]:
        return [
            Stage("copy", self._copy),
            Stage("prepare", partial(prepare, self._model.block)),
            Stage("write", self._write),
            Stage("barrier", self._barrier),
        ]

    def _barrier(self, work: Work) -> None:
        """Stage 4: nobody's slot is used again before all of the mesh have written the group."""
        group = work.rank_group
        self._raise_at(self._meshes[group.group.mesh], BARRIER + group.idx)
        self._pipeline.wait(self._came[group.idx], len(group.group.mesh) - 1)


class Sender(Way):
    """Writes its bf16 shards to rank 0, where there is room for them."""

    @property
    def is_writer(self) -> bool:
        return False

    def _choose_groups(self) -> tuple[RankGroup, ...]:
        return self._shards

    def _meet(self) -> None:
        self._credits = self._counters(CREDIT)

    def _stages(self) -> list[Stage]:
        return [Stage("copy", self._copy), Stage("credit", self._credit), Stage("write", self._gather)]

    def _credit(self, work: Work) -> None:
        """Waits until rank 0 has sent the group that had the slot before. A version begins with all slots free."""
        before = work.rank_group.idx - self._options.slots
        if before >= 0:
            self._pipeline.wait(self._credits[before], 1)

    def _gather(self, work: Work) -> None:
        idx = work.rank_group.idx
        writes = gather_writes(self._model, work.rank_group.group, self._rank)
        slot = self._training[ROOT][1 + idx % self._options.slots]
        write_all(self._engine, work.slot.copied_handle, writes, [slot], GATHER + idx)


class Root(Way):
    """Rank 0: gathers all parameters, prepares them, and writes all that inference wants."""

    def _meet(self) -> None:
        self._others = self._peers(tuple(range(self._options.num_training)))
        self._gathered = self._counters(GATHER)

    def _stages(self) -> list[Stage]:
        return [
            Stage("gather", self._gather),
            Stage("prepare", partial(prepare, self._model.block)),
            Stage("write", self._write),
            Stage("credit", self._credit),
        ]

    def _gather(self, work: Work) -> None:
        """Copies its own shard, and waits for those of the others."""
        idx = work.rank_group.idx
        group = self._model.groups[idx]
        if ROOT in group.mesh:
            for _, src, dst, num_bytes in gather_writes(self._model, group, ROOT):
                first, stop = self._first[idx] + src // BF16_BYTES, num_bytes // BF16_BYTES
                work.slot.copied[dst // BF16_BYTES :][:stop].copy_(self._storage[first:][:stop])
        others = [gather_writes(self._model, group, rank) for rank in group.mesh if rank != ROOT]
        self._pipeline.wait(self._gathered[idx], sum(map(len, others)) * self._engine.num_domains)

    def _credit(self, work: Work) -> None:
        self._raise_at(self._others, CREDIT + work.rank_group.idx)


def gather_writes(model: Model, group: MeshGroup, rank: int) -> list[Write]:
    """Returns the writes that bring a rank's shards of a group to rank 0, from where they lie here to where there."""
    writes, own, all_before = list[Write](), 0, 0
    for weight in group.weights:
        for parameter in weight.parameters:
            first, stop = shard_rows(parameter, unit_of(weight, model.block), group.mesh, rank)
            num_elements = (stop - first) * parameter.cols
            if num_elements:
                at = all_before + first * parameter.cols
                writes.append(Write(0, own * BF16_BYTES, at * BF16_BYTES, num_elements * BF16_BYTES))
            own += num_elements
            all_before += parameter.rows * parameter.cols
    return writes


def make_way(rank: int, options: Options, engine: TransferEngine) -> Way:
    if not options.through_rank_0:
        return Direct(rank, options, engine)
    return (Root if rank == ROOT else Sender)(rank, options, engine)
