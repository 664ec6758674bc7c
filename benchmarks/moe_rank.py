"""One rank of benchmarks/moe.py: measures its part of every variant and leaves it as JSON.

moe_rank.py ours       the bundled kernels, and `sorted` over the process group
moe_rank.py vdev_2d    torch.ops.symm_mem.all_to_all_vdev_2d, alone: it may not start, or not end
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe import SEED, traffic
from moe_peers import Exchange, Vdev2d, importable_peers, nvshmem

import tracekern
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.calls.pipeline import Pipeline
from tracekern.moe.experts import Experts, draw_experts
from tracekern.moe.families import FAMILIES, FAMILY_OF
from tracekern.moe.reference import sorted_all_to_all
from tracekern.moe.routing import Batch, draw_batch
from tracekern.moe.shape import MoeShape

FLUSH_BYTES = 256 << 20
DELAY_CYCLES = 600_000
"""About 0.3 ms: longer than the host takes to queue a sample of ours."""
NUM_SKEW_CALLS = 20
NUM_WARM_UP = 5
NUM_STAGE_SAMPLES = 50
VDEV = "vdev_2d (NVSHMEM)"

Mark = Callable[[str], None]
"""Called with "dispatch" when a leg's last kernel was started, or with each kernel's stage."""


class Rank:
    """What all measurements share."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = json.loads(os.environ["TRACEKERN_BENCHMARK"])
        self.backend = self.options["backend"]
        self.directory = Path(self.options["directory"])
        self.on_gpu = self.backend == "cuda"
        rank = int(os.environ["RANK"])
        if self.on_gpu:
            torch.cuda.set_device(rank)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
        else:
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
        self.group = Group.discover()
        self.flush_buffer = torch.empty(FLUSH_BYTES if self.on_gpu else 0, dtype=torch.uint8, device=self.backend)
        self.cycles_per_us = cycles_per_us() if self.on_gpu else 0.0
        self.rows: list[dict[str, Any]] = []

    def shape(self, load: str) -> MoeShape:
        keys = self.options
        most = max(keys["tokens"], 1) if not load.endswith("each") else keys["many"]
        return MoeShape(keys["ranks"], most, keys["experts"], keys["topk"], keys["hidden"], keys["dtype"])

    def batch(self, load: str, rank: int) -> Batch:
        tokens = self.options["loads"][load][rank]
        shape = dataclasses.replace(self.shape(load), max_tokens=tokens)
        return draw_batch(shape, seed=SEED, rank=rank, iteration=0, routing="uniform", uneven=False)

    def measure(
        self,
        load: str,
        name: str,
        call: Callable[[Mark], Any],
        barrier: Callable[[], None],
        delay_cycles: int = DELAY_CYCLES,
    ) -> None:
        """Times `call`; `barrier` queues a barrier of all ranks on the device. delay_cycles: see DELAY_CYCLES."""
        us: dict[str, list[float]] = {"call": []}
        for sample in range(NUM_WARM_UP + self.options["samples"]):
            stamps = self._sample(call, barrier, delay_cycles)
            if sample < NUM_WARM_UP:
                continue
            us["call"].append(stamps["end"])
            if "dispatch" in stamps:
                us.setdefault("dispatch", []).append(stamps["dispatch"])
                us.setdefault("combine", []).append(stamps["end"] - stamps["dispatch"])
        self.rows.append({"load": load, "name": name, "us": us})
        self.save()

    def measure_stages(self, stages: Sequence[str], call: Callable[[Mark], Any], barrier: Callable[[], None]) -> None:
        """Adds to the last row the median us of each stage and of the call. These samples are separate: events between
        all kernels would change those of measure()."""
        us: dict[str, list[float]] = {stage: [] for stage in (*stages, "call")}
        for _ in range(min(NUM_STAGE_SAMPLES, self.options["samples"])):
            stamps = self._sample(call, barrier, 2 * DELAY_CYCLES)
            us["call"].append(stamps["end"])
            started = 0.0
            for stage in stages:
                us[stage].append(stamps[stage] - started)
                started = stamps[stage]
        self.rows[-1]["stage_us"] = {stage: statistics.median(found) for stage, found in us.items()}
        self.save()

    def _sample(self, call: Callable[[Mark], Any], barrier: Callable[[], None], delay_cycles: int) -> dict[str, float]:
        """us since the barrier of each mark, and of the end."""
        if not self.on_gpu:
            times: dict[str, float] = {}
            barrier()
            started = time.perf_counter()
            self._come_late()
            call(lambda name: times.__setitem__(name, time.perf_counter()))
            times["end"] = time.perf_counter()
            return {name: (at - started) * 1e6 for name, at in times.items()}
        events: dict[str, Any] = {}

        def mark(name: str) -> None:
            events[name] = torch.cuda.Event(enable_timing=True)
            events[name].record()

        self.flush_buffer.zero_()
        torch.cuda._sleep(delay_cycles)
        barrier()
        mark("start")
        self._come_late()
        call(mark)
        mark("end")
        torch.cuda.synchronize()
        start = events.pop("start")
        return {name: start.elapsed_time(event) * 1e3 for name, event in events.items()}

    def _come_late(self) -> None:
        if self.options["late"] != self.group.rank:
            return
        late_us = self.options["late_us"]
        if self.on_gpu:
            torch.cuda._sleep(int(late_us * self.cycles_per_us))
        else:
            time.sleep(late_us / 1e6)

    def save(self) -> None:
        """What was measured so far: the next one may not end."""
        path = self.directory / f"{sys.argv[1]}.rank{self.group.rank}.json"
        path.write_text(json.dumps(self.rows))


def cycles_per_us() -> float:
    """Cycles of torch.cuda._sleep() in a microsecond."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20 * DELAY_CYCLES)  # until the clock is up
    start.record()
    torch.cuda._sleep(20 * DELAY_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return 20 * DELAY_CYCLES / (start.elapsed_time(end) * 1e3)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be measured; options: of the variant's family."""

    name: str
    variant: str
    grid: tuple[int, int]
    options: dict[str, int]

    def make_pipeline(self, rank: Rank, shape: MoeShape) -> Pipeline:
        return FAMILY_OF[self.variant].make_pipeline(
            rank.group,
            shape,
            self.variant,
            timeout_s=10.0,
            num_blocks=self.grid[0],
            warps_per_block=self.grid[1],
            backend=rank.backend,
            **self.options,
        )


def plans(rank: Rank) -> list[Plan]:
    keys = rank.options
    grid = (keys["blocks"], keys["warps"])
    if not keys["sweep"]:
        return [Plan(variant, variant, grid, {}) for variant in keys["variants"] or FAMILIES["p2p"].variants]
    grids = [(132, 16), (128, 16), (66, 16), (132, 8), (132, 12)] if rank.on_gpu else [(2, 2), (4, 4)]
    if keys["blocks"] or keys["warps"]:
        grids = [grid]
    found = []
    for variant in keys["variants"] or ("dedup", "reduce", "pipelined"):
        swept = [{}]
        for option in FAMILY_OF[variant].options_of(variant):
            swept = [{**options, option.name: value} for options in swept for value in (1, 2, 4, 8, 16, 32)]
        for options in swept:
            told = "".join(f" /{value}" for value in options.values())
            found += [Plan(f"{variant} {grid[0]}x{grid[1]}{told}", variant, grid, options) for grid in grids]
    return found


def wanted_bits(batch: Batch, experts: Experts, shape: MoeShape) -> Callable[[str], torch.Tensor]:
    """Variant -> its result. Each reference runs once; sorted has the bits of `reference`, which is slow."""
    known = {"reference": sorted_all_to_all(batch, experts, shape)}

    def wanted(variant: str) -> torch.Tensor:
        family = FAMILY_OF[variant]
        name = family.reference_name(variant)
        if family.expected is None:
            raise BadInput(f"variant {variant} returns what was received; this times calls that come back")
        if name not in known:
            known[name] = family.expected(variant, batch, experts, shape, {})
        return known[name]

    return wanted


def measure_ours(rank: Rank) -> None:
    notes = importable_peers()
    skew: dict[str, list[int]] = {}
    for load in rank.options["loads"]:
        shape, experts = rank.shape(load), draw_experts(rank.shape(load)).to(rank.backend)
        batch = rank.batch(load, rank.group.rank).to(rank.backend)
        wanted = wanted_bits(batch, experts, shape)
        planned = plans(rank)
        for plan in planned:
            rank.group.barrier()
            try:
                pipeline = plan.make_pipeline(rank, shape)
            except BadInput as error:
                notes[f"{plan.name}, {load}"] = str(error)
                continue
            measure_pipeline(rank, load, plan.name, pipeline, batch, experts, wanted(plan.variant))
            if plan == planned[-1]:
                skew[load] = entry_skew(rank, pipeline, batch, experts)
            rank.group.barrier()
            del pipeline
            gc.collect()
        measure_sorted(rank, load, batch, experts)
    write_about(rank, notes, skew)


def measure_pipeline(
    rank: Rank, load: str, name: str, pipeline: Pipeline, batch: Batch, experts: Experts, wanted: torch.Tensor
) -> None:
    out = torch.empty_like(batch.x)
    last_of_dispatch = [stage for stage in pipeline.stages if stage.startswith("dispatch")][-1]

    def call_by_stage(mark: Mark) -> None:
        pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, out=out, after_stage=mark)

    def call(mark: Mark) -> None:
        def after_stage(stage: str) -> None:
            if stage == last_of_dispatch and len(pipeline.stages) > 1:
                mark("dispatch")

        pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, out=out, after_stage=after_stage)

    def barrier() -> None:
        stream = {"stream": torch.cuda.current_stream().cuda_stream} if rank.on_gpu else {}
        pipeline.comm.native.barrier(**stream)

    def check(when: str) -> None:
        pipeline.synchronize()
        wrong = int((bits(out) != bits(wanted)).sum())
        if wrong:
            raise RuntimeError(f"error: {name}, {load}: {wrong} elements are wrong {when}")

    out.fill_(float("nan"))
    call(lambda _: None)
    check("at once")
    rank.measure(load, name, call, barrier)
    check("in the last call that was timed")
    rank.measure_stages(pipeline.stages, call_by_stage, barrier)
    check("in the last call that was timed by stage")


def measure_sorted(rank: Rank, load: str, batch: Batch, experts: Experts) -> None:
    """sorted: the host waits for the split sizes in its middle, as whoever writes it in torch has to."""
    if rank.options["no_peers"]:
        return
    shape = rank.shape(load)
    token = torch.zeros(1, device=rank.backend)
    name = "sorted (NCCL)" if rank.on_gpu else "sorted (gloo)"
    rank.measure(
        load, name, lambda _: sorted_all_to_all(batch, experts, shape), lambda: dist.all_reduce(token) and None
    )


def entry_skew(rank: Rank, pipeline: Pipeline, batch: Batch, experts: Experts) -> list[int]:
    """ns between the first and the last rank's first warp, of each of some calls behind a barrier; on rank 0."""
    directory = rank.directory / "skew"
    with tracekern.capture(directory, device=pipeline.comm.device, records_per_track=64) as capture:
        for _ in range(NUM_SKEW_CALLS):
            if rank.on_gpu:
                torch.cuda._sleep(10 * DELAY_CYCLES)  # a traced launch takes the host longer
            pipeline.comm.native.barrier(**({"stream": torch.cuda.current_stream().cuda_stream} if rank.on_gpu else {}))
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=capture)
            pipeline.synchronize()
    if rank.group.rank:
        return []
    timeline = tracekern.load(directory)
    first_stage = pipeline.stages[0]
    starts: dict[int, dict[int, int]] = {}
    ranks = timeline.track_ranks()
    for start, track, launch in zip(
        timeline.spans.start.tolist(), timeline.spans.track.tolist(), timeline.spans.launch.tolist(), strict=True
    ):
        if launch < 0 or timeline.launches[launch].name != first_stage:
            continue
        by_rank = starts.setdefault(timeline.launches[launch].sequence, {})
        by_rank[int(ranks[track])] = min(start, by_rank.get(int(ranks[track]), start))
    return [
        max(by_rank.values()) - min(by_rank.values())
        for by_rank in starts.values()
        if len(by_rank) == rank.group.num_ranks
    ]


def write_about(rank: Rank, notes: dict[str, str], skew: dict[str, list[int]]) -> None:
    if rank.group.rank:
        return
    about: dict[str, Any] = {"notes": notes, "traffic": {}}
    for load in rank.options["loads"]:
        shape = rank.shape(load)
        chosen = [rank.batch(load, peer).topk_idx.numpy() for peer in range(rank.group.num_ranks)]
        about["traffic"][load] = traffic(chosen, shape.num_ranks, shape.num_experts, shape.row_bytes)
    about["entry_skew_ns"] = {
        load: {"median": statistics.median(found), "max": max(found), "calls": len(found)}
        for load, found in skew.items()
        if found
    }
    (rank.directory / "about.json").write_text(json.dumps(about))


def measure_vdev(rank: Rank, load: str, exchange: Exchange) -> None:
    shape, experts = rank.shape(load), draw_experts(rank.shape(load)).to("cuda")
    batch = rank.batch(load, rank.group.rank).to("cuda")
    peer = Vdev2d(shape, exchange)
    wanted = bits(sorted_all_to_all(batch, experts, shape))

    def check(when: str) -> None:
        wrong = int((bits(peer(batch, experts)) != wanted).any(dim=1).sum())
        counts = rank.group.all_gather(wrong)
        if any(counts):
            lines = rank.group.all_gather(peer.diagnose(rank.group.all_gather))
            told = [f"rank {source}: {count} tokens: {lines[source]}" for source, count in enumerate(counts) if count]
            raise RuntimeError(f"error: vdev_2d, {load}, wrong {when}: " + " | ".join(told))

    check("at once")
    token = torch.zeros(1, device="cuda")

    def call(mark: Mark) -> None:
        peer(batch, experts, lambda: mark("dispatch"))

    # Some thirty operations of torch: the host takes longer to queue them.
    rank.measure(load, VDEV, call, lambda: dist.all_reduce(token) and None, 8 * DELAY_CYCLES)
    try:
        check("after it was timed")
    except RuntimeError:
        rank.rows = [row for row in rank.rows if (row["load"], row["name"]) != (load, VDEV)]
        rank.save()
        raise


if __name__ == "__main__":
    this = Rank()
    if sys.argv[1] == "ours":
        measure_ours(this)
    else:
        over = nvshmem()
        for each_load in this.options["loads"]:
            measure_vdev(this, each_load, over)
    this.save()
    dist.destroy_process_group()
