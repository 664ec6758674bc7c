"""Synthetic runs in which a cause and the waits for it lie apart: chains of ranks, kernels one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from scenarios import Scenario

COPY_NS, RECEIVE_NS, GAP_NS = 2_000, 500, 800


class CallScenario(Scenario):
    """Kernels follow each other after GAP_NS, and share an epoch until the next call."""

    call = 0

    def launch(self, name: str, at: int | None = None, late: Mapping[int, int] | None = None) -> None:
        """late: ns by rank by which its host starts the kernel later."""
        super().launch(name, at, {rank: GAP_NS + (late or {}).get(rank, 0) for rank in self.ranks})
        for idx in range(-len(self.ranks), 0):
            self._launches[idx] = dataclasses.replace(self._launches[idx], epoch=1 + self.call)


def chain(delay_ns: int, num_calls: int = 4, num_ranks: int = 3) -> Scenario:
    """Rank 0 works `delay_ns` longer; each rank waits for the one before it, works, and tells the next one."""
    run = CallScenario(num_ranks)
    for call in range(num_calls):
        run.call = call
        run.launch("dispatch")
        for rank in run.ranks:
            if rank:
                run.wait(rank, rank - 1)
            run.work(rank, COPY_NS + (delay_ns if rank == 0 else 0))
            run.signal(rank, (rank + 1) % num_ranks)
        run.launch("finish")  # all ranks meet, so that the next call begins together
        run.meet()
    return run


def pipeline(
    num_ranks: int = 4,
    num_calls: int = 4,
    copy: Mapping[int, int] | None = None,
    receive: Mapping[int, int] | None = None,
    gap: Mapping[int, int] | None = None,
    drain: Mapping[tuple[int, int], int] | None = None,
) -> Scenario:
    """Dispatch and combine, each a kernel that sends and one that receives, back to back, a warp a peer.

    copy, receive: ns by which a rank works longer per message in `dispatch_send`, in `dispatch_recv`. gap: ns by which
    its host starts `dispatch_send` later. drain: (source, destination) -> ns by which stores of the dispatch drain
    longer.
    """
    run = CallScenario(num_ranks, num_warps=num_ranks - 1)
    messages = [(rank, warp, (rank + 1 + warp) % num_ranks) for rank in run.ranks for warp in run.warps]
    for call in range(num_calls):
        run.call = call
        for slot, half in enumerate(("dispatch", "combine")):
            copy_of, receive_of, gap_of, drain_of = (
                (given or {}) if slot == 0 else {} for given in (copy, receive, gap, drain)
            )
            run.launch(f"{half}_send", late=gap_of)
            for rank, warp, peer in messages:
                run.work(rank, COPY_NS + copy_of.get(rank, 0), warp)
                run.signal(rank, peer, slot, ns=40 + drain_of.get((rank, peer), 0), warp=warp)
            run.launch(f"{half}_recv")
            for rank, warp, peer in messages:
                run.wait(rank, peer, slot, warp)
                run.work(rank, RECEIVE_NS + receive_of.get(rank, 0), warp, "receive_token")
    return run


def every_kind_of_wait() -> Scenario:
    run = CallScenario(3, num_warps=2)
    for call in range(3):
        run.call = call
        run.launch("dispatch")
        for rank in run.ranks:
            run.work(rank, 300 * (rank + call) + 100)
            run.pause(rank, 70, warp=1)
            run.grant(rank, (rank + 1) % 3, value=call + 1, warp=1)
        for rank in run.ranks:
            run.wait_room(rank, (rank - 1) % 3, wanted=call + 1)
            run.signal(rank, (rank + 1) % 3, ns=900)
        for rank in run.ranks:
            run.wait(rank, (rank - 1) % 3, warp=1)
            run.wait_other(rank, 250, warp=1)
            run.meet_block(rank)
            run.work(rank, 120 + 50 * rank)
        run.meet()
    return run
