"""One rank of `tracekern run moe`: python -m tracekern.moe.worker, under our launcher or torchrun.

Reads its options from TRACEKERN_MOE_RUN (the fields of MoeRun as JSON), leaves rank_<r>.json in TRACEKERN_MOE_REPORTS
and its part of the capture in TRACEKERN_MOE_CAPTURE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tracekern import _C
from tracekern.comm.communicator import Communicator
from tracekern.comm.group import Group
from tracekern.comm.preflight import why_no_gpu
from tracekern.errors import BadInput, CommTimeout, TracekernError
from tracekern.moe.experts import Experts, draw_experts
from tracekern.moe.families import FAMILY_OF
from tracekern.moe.reference import reference, sorted_all_to_all
from tracekern.moe.routing import Batch, draw_batch
from tracekern.moe.run import PROGRESS, MoeRun, RankReport, reference_name
from tracekern.record.session import Capture, capture

Call = Callable[[Batch, Capture | None], torch.Tensor]

TELL_EVERY_S = 0.1
"""A rank that tells enters its next call later than the others, and they wait for it: docs/walkthrough.md."""

MAX_BYTES = {"cpu": 1 << 30, "cuda": 1 << 29}
"""Cap of a rank's profile buffers; on a GPU all of it is pinned at once."""


def main() -> int:
    """Runs this rank; returns its exit code."""
    # Until there is something to keep Ctrl-C just ends it, also while it waits for the others in C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank = int(os.environ.get("RANK", "0"))
    try:
        report = _run_rank(_options_from_environment())
    except TracekernError as error:
        followed = isinstance(error, CommTimeout) and error.fault.get("cause") == "peer_aborted"
        report = RankReport(rank=rank, ok=False, error=str(error), exit_code=error.exit_code, followed=followed)
    reports_dir = os.environ.get("TRACEKERN_MOE_REPORTS")
    if reports_dir:
        Path(reports_dir, f"rank_{rank}.json").write_text(json.dumps(dataclasses.asdict(report)))
    if report.error:
        sys.stderr.write(report.error + "\n")
    return report.exit_code


def _options_from_environment() -> MoeRun:
    text = os.environ.get("TRACEKERN_MOE_RUN", "{}")
    try:
        return MoeRun(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise BadInput(f"TRACEKERN_MOE_RUN is {text!r}: {error}") from None


def _run_rank(options: MoeRun) -> RankReport:
    torch.set_num_threads(1)
    if options.ranks > 1:
        dist.init_process_group("gloo")
    backend = _choose_backend(options)
    group = Group.discover()
    if group.num_ranks != options.ranks:
        raise BadInput(f"{group.num_ranks} ranks were started, the run is for {options.ranks}")
    batches = [_draw(options, group.rank, iteration) for iteration in range(options.iterations)]
    if backend != "cpu":
        # Not on the CPU: no handler of Python's runs while a kernel does on this thread, for as long as its time limit.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    call, comm, family_options = _prepare(options, group, backend)
    inputs = [batch.to(backend) for batch in batches]
    directory = os.environ.get("TRACEKERN_MOE_CAPTURE", "")
    with _capture(options, directory, comm) as capture:
        if capture is not None:
            _count(capture, call, inputs[: _num_counted(options, backend)])
        with _torch_profile(options, capture, backend, lambda: call(inputs[0], None)):
            comm.barrier(capture)
            outputs, times = _timed_calls(inputs, call, capture, options, group.rank)
        footprint = capture.footprint_bytes if capture is not None else 0
    experts = draw_experts(options.shape)
    wrong = sum(_count_wrong(options, batch, experts, out.cpu()) for batch, out in zip(batches, outputs, strict=True))
    if dist.is_initialized():
        dist.destroy_process_group()
    error = f"rank {group.rank}: {wrong} elements differ from {reference_name(options.variant)}" if wrong else ""
    return RankReport(
        rank=group.rank,
        ok=not wrong,
        error=error,
        exit_code=1 if wrong else 0,
        wrong_elements=wrong,
        tokens=sum(batch.num_tokens for batch in batches),
        family_options=family_options,
        iteration_ms=tuple(times),
        footprint_bytes=footprint,
    )


def _num_counted(options: MoeRun, backend: str) -> int:
    """How many calls counting() has to see; nothing of these is recorded, whatever happens in them.

    The first records of a track find room only where the largest call was counted. A flight recorder's tracks are of
    one size; there counting() only says where records go, which is a question on GPUs alone, and any call answers it.
    """
    if options.records_per_track != "auto":
        return 0
    if options.keep == "first":
        return options.iterations
    return 0 if backend == "cpu" else 1


def _count(capture: Capture, call: Call, inputs: list[Batch]) -> None:
    if inputs:
        with capture.counting():
            for batch in inputs:
                call(batch, capture)


def _draw(options: MoeRun, rank: int, iteration: int) -> Batch:
    return draw_batch(
        options.shape,
        seed=options.seed,
        rank=rank,
        iteration=iteration,
        routing=options.routing,
        uneven=options.uneven,
    )


def _choose_backend(options: MoeRun) -> str:
    """ "cpu" or "cuda"; of fewer GPUs than ranks each serves several. Raises BadInput where there is none."""
    missing = why_no_gpu()
    num_gpus = 0 if missing else torch.cuda.device_count()
    on_cpu = options.variant not in FAMILY_OF or options.backend == "cpu"
    if on_cpu or (options.backend == "auto" and num_gpus < options.ranks):
        return "cpu"
    if num_gpus == 0:
        raise BadInput(f"{missing}; take the backend cpu")
    gpu = int(os.environ.get("LOCAL_RANK", "0")) % num_gpus
    try:
        torch.cuda.set_device(gpu)
    except RuntimeError as error:  # such as a driver that is too old for torch
        why = str(error).partition("\n")[0]
        raise BadInput(f"torch cannot use GPU {gpu}: {why}; or take the backend cpu") from None
    return "cuda"


def _prepare(options: MoeRun, group: Group, backend: str) -> tuple[Call, Communicator, dict[str, int]]:
    """The variant as a call that returns when its work is through, the communicator, and its family's options."""
    shape, experts, timeout_s = options.shape, draw_experts(options.shape).to(backend), options.timeout_ms / 1e3
    if options.variant in FAMILY_OF:
        family = FAMILY_OF[options.variant]
        grid = (4, 4) if backend == "cpu" else (128, 16)
        pipeline = family.make_pipeline(
            group,
            shape,
            options.variant,
            timeout_s=timeout_s,
            num_blocks=options.blocks or grid[0],
            warps_per_block=options.warps or grid[1],
            backend=backend,
            **options.family_options,
        )

        def call(batch: Batch, capture: Capture | None) -> torch.Tensor:
            out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=capture)
            pipeline.synchronize()
            return out

        chosen = {option.name: pipeline.options[option.name] for option in family.options_of(options.variant)}
        return call, pipeline.comm, chosen
    comm = Communicator(group, _C.heap_control_bytes, timeout_s, backend)
    if options.variant == "sorted":
        return lambda batch, _: sorted_all_to_all(batch, experts, shape), comm, {}
    return lambda batch, _: reference(batch, experts), comm, {}


def _capture(options: MoeRun, directory: str, comm: Communicator) -> Any:
    if not directory:
        return contextlib.nullcontext()
    return capture(
        directory,
        records_per_track=options.records_per_track,
        keep=options.keep,
        every=options.every,
        settings=options.workload,
        command=options.command,
        device=comm.device,
        max_bytes=MAX_BYTES[comm.device.backend],
    )


def _timed_calls(
    batches: list[Batch], call: Call, capture: Capture | None, options: MoeRun, rank: int
) -> tuple[list[torch.Tensor], list[float]]:
    """All calls back to back, no barrier in between; host milliseconds of each."""
    outputs, times, told_s = [], [], time.monotonic()
    for iteration, batch in enumerate(batches):
        started = time.perf_counter()
        with capture.range(f"{options.variant} call") if capture is not None else contextlib.nullcontext():
            outputs.append(call(batch, capture))
        times.append((time.perf_counter() - started) * 1e3)
        if rank == 0 and (time.monotonic() - told_s > TELL_EVERY_S or iteration + 1 == len(batches)):
            sys.stdout.write(f"{PROGRESS}{iteration + 1}\n")
            sys.stdout.flush()
            told_s = time.monotonic()
    return outputs, times


@contextlib.contextmanager
def _torch_profile(options: MoeRun, capture: Capture | None, backend: str, warm_up: Callable[[], object]) -> Any:
    """Adds torch.profiler's lanes of the block, on GPUs with the kernels as CUPTI saw them.

    warm_up: a call before, not in the profile. Under a profiler's first launches the host takes up to a second or two,
    on each rank another time (4 H200, 2026-11-22), and all ranks would seem to wait for that.
    """
    if not options.torch_profiler or capture is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile, schedule

    # That it keeps one cycle only: there is but one.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if backend == "cuda" else [])
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1)) as profiler:
        warm_up()
        profiler.step()
        yield
    capture.add_torch_profile(profiler)


def _count_wrong(options: MoeRun, batch: Batch, experts: Experts, out: torch.Tensor) -> int:
    family = FAMILY_OF.get(options.variant)
    wanted = family.expected(options.variant, batch, experts, options.shape) if family else reference(batch, experts)
    bits = torch.int32 if out.dtype == torch.float32 else torch.int16
    return int((wanted.view(bits) != out.view(bits)).sum())


if __name__ == "__main__":
    sys.exit(main())
