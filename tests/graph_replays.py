"""One rank of test_graphs_gpu.py: a captured pipeline, replayed traced and untraced; results are checked on the way.

    python tests/graph_replays.py DIRECTORY REPLAYS SINK [late|reading]

late: the host lays no set ready in time. reading: each replay is read while the next one runs. Prints one JSON object:
the first epoch, which calls were traced, the records of one call, what was lost, and what was read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tracekern.comm.ranks.group import Group
from tracekern.dump.format import ENTRY_COUNTED_ONLY, ENTRY_IN_GRAPH
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.reference import reference
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.record.graphs import TracedGraph
from tracekern.record.session import Capture, capture

NUM_BATCHES = 3
GRID = {"num_blocks": 8, "warps_per_block": 4}
UNTRACED_EVERY = 4
SLOTS = 64
"""Far fewer than replays: each is used many times."""
SLEEP_CYCLES = 100_000_000
"""Some 50 ms, in which the host reads what the replay before left."""


class Workload:
    """A pipeline with NUM_BATCHES inputs and their expected results, and a call that is the same for all of them."""

    def __init__(self, group: Group) -> None:
        shape = MoeShape(group.num_ranks, 16, 8 * group.num_ranks, 4, 256, "bf16")
        self.pipeline = P2PPipeline(group, shape, "balanced", backend="cuda", **GRID)
        experts = draw_experts(shape)
        batches = [
            draw_batch(shape, seed=3, rank=group.rank, iteration=i, routing="uniform", uneven=False)
            for i in range(NUM_BATCHES)
        ]
        self.experts = experts.to("cuda")
        self.expected = [reference(batch, experts).cuda() for batch in batches]
        self.inputs = [vars(batch.to("cuda")) for batch in batches]
        self.given = {name: tensor.clone() for name, tensor in self.inputs[0].items()}
        self.out = torch.empty_like(self.given["x"])
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def feed(self, idx: int) -> None:
        for name, tensor in self.inputs[idx].items():
            self.given[name].copy_(tensor)

    def call(self, session: Capture) -> None:
        self.pipeline(**self.given, experts=self.experts, out=self.out, capture=session)

    def check(self, idx: int) -> None:
        self.wrong += (self.out != self.expected[idx]).sum()


def main() -> None:
    directory, replays, sink = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    late, reading = "late" in sys.argv, "reading" in sys.argv
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    work = Workload(Group.discover())
    with capture(directory, device=work.pipeline.comm.device, sink=sink, max_bytes=1 << 28) as session:
        with session.counting():
            for idx in range(NUM_BATCHES):
                work.feed(idx)
                work.call(session)
                work.pipeline.synchronize()
        counted = counted_records(session)

        def run() -> None:
            if reading:
                torch.cuda._sleep(SLEEP_CYCLES)
            work.call(session)

        graph = session.graph(run, name="decode", slots=4 if late else SLOTS)
        traced = [late or reading or step % UNTRACED_EVERY != 1 for step in range(replays)]
        if late:
            enqueued_s, was_read = replay_late(graph, replays), []
        elif reading:
            enqueued_s, was_read = 0.0, replay_and_read(graph, session, replays)
        else:
            enqueued_s, was_read = replay(graph, work, traced), []
        work.pipeline.synchronize()
    report = {
        "was_read": was_read,
        "wrong": int(work.wrong),
        "traced": traced,
        "counted": counted,
        "lost_replays": graph.lost_replays,
        "lost_records": graph.lost_records,
        "enqueued_s": enqueued_s,
    }
    print(json.dumps(report), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def replay(graph: TracedGraph, work: Workload, traced: list[bool]) -> float:
    """Each replay with another input; returns the seconds it took to enqueue them."""
    started = time.monotonic()
    for step, is_traced in enumerate(traced):
        work.feed(step % NUM_BATCHES)
        graph.replay(traced=is_traced)
        work.check(step % NUM_BATCHES)
        if step % (SLOTS // 2) == 0:
            work.pipeline.synchronize()  # the host is never further ahead than there are slots
    return time.monotonic() - started


def replay_and_read(graph: TracedGraph, session: Capture, replays: int) -> list[dict[str, Any]]:
    """Of each replay but the last: its launches as {name: digest}, read while the next one runs."""
    done = [torch.cuda.Event() for _ in range(replays)]
    found = []
    graph.replay()
    done[0].record()
    for number in range(1, replays):
        graph.replay()
        done[number].record()
        done[number - 1].synchronize()
        launches = [entry for entry in session.segment.recorded_launches() if entry["sequence"] == number - 1]
        digests = {
            entry["name"].decode(): digest(session.segment.track_headers(entry), session.segment.records(entry))
            for entry in launches
            if int(entry["flags"]) & ENTRY_IN_GRAPH
        }
        found.append({"launches": digests, "next_was_running": not done[number].query()})
    return found


def digest(headers: np.ndarray, records: np.ndarray) -> str:
    """Of all that the tracks of a launch wrote."""
    written = [track[: header["attempted"]].tobytes() for header, track in zip(headers, records, strict=True)]
    return hashlib.sha256(b"".join(written)).hexdigest()


def replay_late(graph: TracedGraph, replays: int) -> float:
    """All replays behind a sleep of some 200 ms, in which none can start and free its slot."""
    torch.cuda._sleep(400_000_000)
    started = time.monotonic()
    for _ in range(replays):
        graph.replay()
    return time.monotonic() - started


def counted_records(session: Capture) -> list[int]:
    """Records of one call with each batch, over all its launches."""
    entries = [entry for entry in session.segment.launches() if entry["flags"] & ENTRY_COUNTED_ONLY]
    totals = [int(session.segment.track_headers(entry)["attempted"].sum()) for entry in entries]
    of_one_call = len(totals) // NUM_BATCHES
    return [sum(totals[first : first + of_one_call]) for first in range(0, len(totals), of_one_call)]


if __name__ == "__main__":
    main()
