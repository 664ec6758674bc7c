"""Which training rank writes which bytes to which inference rank: computed once, before any are sent.

An inference rank has one region of memory: all scales, then all weights in bf16, then all in fp8, without gaps. A
training rank packs what it writes of a group in the same order. Every write is contiguous at both ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from examples.weights.model import MeshGroup, Model, Parameter, Split, Weight

SCALE_BYTES, BF16_BYTES = 4, 2


@dataclass(frozen=True)
class Place:
    """Where a weight lies in the memory of each inference rank, and the shape of its part there."""

    rows: int
    cols: int
    scales: int
    values: int


class Target(NamedTuple):
    """Where a piece goes: offsets in an inference rank's memory."""

    rank: int
    scales: int
    values: int


@dataclass(frozen=True)
class Piece:
    """A part of one parameter that a training rank prepares: whole blocks, and one stretch at each target."""

    is_fp8: bool
    shard: int
    """Elements before this parameter's rows in the rank's copy of the group."""
    rows: tuple[int, int]
    """First and end, counted from the rank's first row of this parameter."""
    cols: tuple[int, int]
    width: int
    """Columns of the whole parameter."""
    num_scales: int
    targets: tuple[Target, ...]
    scales: int = 0
    """Offset of the scales among what the rank has prepared of the group."""
    values: int = 0

    @property
    def num_values(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])

    @property
    def value_bytes(self) -> int:
        return self.num_values * (1 if self.is_fp8 else BF16_BYTES)

    @property
    def scale_bytes(self) -> int:
        return self.num_scales * SCALE_BYTES


class Write(NamedTuple):
    """One write of a training rank: offsets in what it has prepared of the group, and in the target's memory."""

    rank: int
    src_offset: int
    dst_offset: int
    num_bytes: int


@dataclass(frozen=True)
class RankGroup:
    """What one training rank does of one group."""

    idx: int
    """The group's number in the model."""
    group: MeshGroup
    num_elements: int
    """How many of the group's elements this rank has."""
    prepared_bytes: int
    pieces: tuple[Piece, ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True)
class Schedule:
    """All writes. ranks: training rank -> its groups, in their order."""

    places: dict[str, Place]
    num_bytes: int
    """How many each inference rank has for its weights."""
    num_inference: int
    ranks: dict[int, tuple[RankGroup, ...]]


def make_schedule(model: Model, num_training: int, num_inference: int, is_whole: bool = False) -> Schedule:
    """Returns the checked schedule. is_whole: every inference rank gets all of each weight, as from a broadcast.

    Raises ValueError where a weight cannot be split into whole blocks.
    """
    planner = _Planner(model, 1 if is_whole else num_inference, num_inference)
    ranks = {
        rank: tuple(planner.rank_group(idx, rank) for idx, group in enumerate(model.groups) if rank in group.mesh)
        for rank in range(num_training)
    }
    schedule = Schedule(planner.places, planner.num_bytes, num_inference, ranks)
    check(schedule)
    return schedule


def check(schedule: Schedule) -> None:
    """Raises ValueError unless every byte of every inference rank is written exactly once."""
    for rank in range(schedule.num_inference):
        end = 0
        for write in sorted(_writes_to(schedule, rank), key=lambda write: write.dst_offset):
            if write.dst_offset != end:
                fault = "twice" if write.dst_offset < end else "by nobody"
                raise ValueError(f"inference rank {rank}: bytes from {min(end, write.dst_offset)} are written {fault}")
            end += write.num_bytes
        if end != schedule.num_bytes:
            raise ValueError(f"inference rank {rank}: {end} bytes are written; wanted {schedule.num_bytes}")


def shard_rows(parameter: Parameter, unit: int, mesh: tuple[int, ...], rank: int) -> tuple[int, int]:
    """The rows that a training rank has: whole units of rows, as even as they go."""
    place, num_units = mesh.index(rank), parameter.rows // unit
    return place * num_units // len(mesh) * unit, (place + 1) * num_units // len(mesh) * unit


def unit_of(weight: Weight, block: int) -> int:
    """Rows that no boundary may cut."""
    return block if weight.is_fp8 else 1


def _writes_to(schedule: Schedule, rank: int) -> Iterator[Write]:
    for groups in schedule.ranks.values():
        for group in groups:
            yield from (write for write in group.writes if write.rank == rank)


class _Planner:
    """Lays out the memory of an inference rank, and cuts what each training rank has into pieces."""

    def __init__(self, model: Model, num_parts: int, num_inference: int) -> None:
        self._model, self._num_parts, self._num_inference = model, num_parts, num_inference
        self.places: dict[str, Place] = {}
        weights = [weight for group in model.groups for weight in group.weights]
        shapes = {weight.name: self._part_shape(weight) for weight in weights}
        scales: dict[str, int] = {}
        end = 0
        for weight in weights:
            scales[weight.name] = end
            if weight.is_fp8:
                rows, cols = shapes[weight.name]
                end += rows // model.block * (cols // model.block) * SCALE_BYTES
        for weight in sorted(weights, key=lambda weight: weight.is_fp8):
            rows, cols = shapes[weight.name]
            self.places[weight.name] = Place(rows, cols, scales[weight.name], end)
            end += rows * cols * (1 if weight.is_fp8 else BF16_BYTES)
        self.num_bytes = end

    def rank_group(self, idx: int, rank: int) -> RankGroup:
        group, pieces, shard = self._model.groups[idx], list[Piece](), 0
        for weight in group.weights:
            above = 0
            for parameter in weight.parameters:
                held = shard_rows(parameter, unit_of(weight, self._model.block), group.mesh, rank)
                pieces += self._pieces(weight, parameter, held, shard, above)
                shard += (held[1] - held[0]) * parameter.cols
                above += parameter.rows // self._row_parts(weight)
        packed, end = _pack(pieces)
        return RankGroup(idx, group, shard, end, packed, tuple(_writes(packed)))

    def _pieces(
        self, weight: Weight, parameter: Parameter, held: tuple[int, int], shard: int, above: int
    ) -> Iterator[Piece]:
        """What a rank that holds these rows sends. above: rows of other parameters above them at a target."""
        unit, place = unit_of(weight, self._model.block), self.places[weight.name]
        for part in range(1 if weight.split is Split.NONE else self._num_parts):
            first = part * (parameter.rows // self._num_parts) if weight.split is Split.ROWS else 0
            stop = first + parameter.rows // self._row_parts(weight)
            left = part * place.cols if weight.split is Split.COLUMNS else 0
            rows = max(first, held[0]), min(stop, held[1])
            if rows[0] >= rows[1]:
                continue
            row = above + rows[0] - first
            scales = place.scales + row // unit * (place.cols // unit) * SCALE_BYTES
            values = place.values + row * place.cols * (1 if weight.is_fp8 else BF16_BYTES)
            yield Piece(
                is_fp8=weight.is_fp8,
                shard=shard,
                rows=(rows[0] - held[0], rows[1] - held[0]),
                cols=(left, left + place.cols),
                width=parameter.cols,
                num_scales=(rows[1] - rows[0]) // unit * (place.cols // unit) if weight.is_fp8 else 0,
                targets=tuple(Target(rank, scales, values) for rank in self._ranks_of(weight, part)),
            )

    def _row_parts(self, weight: Weight) -> int:
        return self._num_parts if weight.split is Split.ROWS else 1

    def _ranks_of(self, weight: Weight, part: int) -> list[int]:
        everybody = range(self._num_inference)
        return [rank for rank in everybody if weight.split is Split.NONE or rank % self._num_parts == part]

    def _part_shape(self, weight: Weight) -> tuple[int, int]:
        """Rows and columns that one inference rank has. Raises ValueError where blocks would be cut."""
        col_parts = self._num_parts if weight.split is Split.COLUMNS else 1
        unit = unit_of(weight, self._model.block)
        row_unit, col_unit = unit * self._row_parts(weight), unit * col_parts
        for parameter in weight.parameters:
            if parameter.rows % row_unit or parameter.cols % col_unit or parameter.cols != weight.cols:
                raise ValueError(
                    f"parameter {parameter.name} is {parameter.rows} x {parameter.cols}; wanted a multiple of "
                    f"{row_unit} rows and {col_unit} columns, and the width of the others in {weight.name}"
                )
        return weight.rows // self._row_parts(weight), weight.cols // col_parts


def _pack(pieces: list[Piece]) -> tuple[tuple[Piece, ...], int]:
    """Returns the pieces with their offsets among what the rank has prepared, and how many bytes that is."""
    end = sum(piece.scale_bytes for piece in pieces)
    offsets: dict[int, int] = {}
    for idx in sorted(range(len(pieces)), key=lambda idx: pieces[idx].is_fp8):
        offsets[idx] = end
        end += pieces[idx].value_bytes
    packed, scales = list[Piece](), 0
    for idx, piece in enumerate(pieces):
        packed.append(replace(piece, scales=scales, values=offsets[idx]))
        scales += piece.scale_bytes
    return tuple(packed), end


def _writes(pieces: tuple[Piece, ...]) -> Iterator[Write]:
    for piece in pieces:
        for target in piece.targets:
            if piece.num_scales:
                yield Write(target.rank, piece.scales, target.scales, piece.scale_bytes)
            yield Write(target.rank, piece.values, target.values, piece.value_bytes)
