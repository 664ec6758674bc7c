"""torch's all_to_all_vdev_2d and its _offset twin for ranks that are threads, in the order of torch 2.11's own steps.

As torch/csrc/distributed/c10d/symm_mem/nvshmem_extension.cu has them: a first kernel leaves sizes and places of the
rows in the peers' tables and ends with a barrier of all ranks; a second one pulls the rows and then overwrites the
places in its own table with those in its output. Nothing waits at the end. `slow` is the rank that does that last step
as late as the others allow: when they stand at their next barrier or are through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from moe_peers import Exchange

LIMIT_S = 60.0
THROUGH = 1 << 60
"""Barriers of a rank that has ended."""


class World:
    """The ranks, their memory, and their barrier."""

    def __init__(self, num_ranks: int, slow: int = -1) -> None:
        self.num_ranks, self.slow = num_ranks, slow
        self.tensors: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
        self.arrived = [0] * num_ranks
        self.changed = threading.Condition()
        self.failed: list[BaseException] = []

    def run(self, body: Callable[[Exchange], Any]) -> list[Any]:
        """What body returned on each rank. Raises what the first that failed raised."""

        def of_rank(rank: int) -> Any:
            try:
                return body(self.exchange(rank))
            except BaseException as error:
                self.failed.append(error)
                raise
            finally:
                with self.changed:
                    self.arrived[rank] = THROUGH
                    self.changed.notify_all()

        with ThreadPoolExecutor(self.num_ranks) as threads:
            futures = [threads.submit(of_rank, rank) for rank in range(self.num_ranks)]
        if self.failed:
            raise self.failed[0]
        return [future.result() for future in futures]

    def exchange(self, rank: int) -> Exchange:
        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            # What memory holds before anybody wrote to it.
            tensor = torch.full(size, 77, dtype=dtype)
            self.tensors[rank].append(tensor)
            self.barrier(rank)
            return tensor

        def dispatch(source: torch.Tensor, out: torch.Tensor, splits: torch.Tensor, table: torch.Tensor) -> None:
            first_rows = torch.cumsum(splits, 0) - splits
            self.move(rank, source, out, (splits, first_rows), table, by_rank=True)

        def combine(source: torch.Tensor, out: torch.Tensor, table: torch.Tensor, table_back: torch.Tensor) -> None:
            self.move(rank, source, out, (table[0].clone(), table[1].clone()), table_back, by_rank=False)

        return Exchange(rank, empty, dispatch, combine)

    def move(self, rank: int, source: Any, out: Any, splits: Any, table: torch.Tensor, by_rank: bool) -> None:
        """by_rank: the input lies by rank and then by group, the output the other way round; else the reverse."""
        num_splits = table.shape[1]
        num_groups = num_splits // self.num_ranks
        for split in range(num_splits):
            if by_rank:
                peer, group = divmod(split, num_groups)
                place = group * self.num_ranks + rank
            else:
                group, peer = divmod(split, self.num_ranks)
                place = rank * num_groups + group
            of_peer = self.of_peer(rank, peer, table)
            of_peer[0, place], of_peer[1, place] = int(splits[0][split]), int(splits[1][split])
        self.barrier(rank)
        row, places = 0, []
        for place in range(num_splits):
            major, minor = divmod(place, self.num_ranks if by_rank else num_groups)
            count, first = table[:, place].tolist()
            from_peer = self.of_peer(rank, minor if by_rank else major, source)
            out[row : row + count] = from_peer[first : first + count]
            places.append(row)
            row += count
            last = minor == (self.num_ranks if by_rank else num_groups) - 1
            if by_rank and last and not int(table[0, place - minor : place + 1].sum()):
                row += 1
        if rank == self.slow:
            self.let_others_run(rank)
        table[1] = torch.tensor(places)

    def of_peer(self, rank: int, peer: int, tensor: torch.Tensor) -> torch.Tensor:
        return self.tensors[peer][next(i for i, mine in enumerate(self.tensors[rank]) if mine is tensor)]

    def barrier(self, rank: int) -> None:
        with self.changed:
            self.arrived[rank] += 1
            target = self.arrived[rank]
            self.changed.notify_all()
            self._wait(lambda: min(self.arrived) >= target)

    def let_others_run(self, rank: int) -> None:
        with self.changed:
            mine = self.arrived[rank]
            others = [peer for peer in range(self.num_ranks) if peer != rank]
            self._wait(lambda: all(self.arrived[peer] > mine for peer in others))

    def _wait(self, ready: Callable[[], bool]) -> None:
        assert self.changed.wait_for(lambda: ready() or bool(self.failed), LIMIT_S), "a rank did not come"
        if self.failed:
            raise RuntimeError("another rank failed")

    def all_gather(self) -> Callable[[int, Any], list[Any]]:
        """(rank, value) -> the values of all ranks, for one exchange."""
        values: list[Any] = [None] * self.num_ranks

        def gather(rank: int, value: Any) -> list[Any]:
            values[rank] = value
            self.barrier(rank)
            return values

        return gather
