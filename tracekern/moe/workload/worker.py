"""One rank of `tracekern run moe`: python -m tracekern.moe.workload.worker, under tracekern's launcher or torchrun.

Reads its options from TRACEKERN_MOE_RUN (the fields of MoeRun as JSON). Writes its part of the capture to
TRACEKERN_MOE_CAPTURE, and tells tracekern's launcher its phases, its progress and at the end its RankReport.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tracekern import _core
from tracekern.comm.communicator import Communicator
from tracekern.comm.devices.host_memory import shortage
from tracekern.comm.devices.preflight import why_no_gpu
from tracekern.comm.devices.this_thread import rank_of_thread, this_resident
from tracekern.comm.ranks.group import Group
from tracekern.comm.ranks.launcher_environment import local_rank
from tracekern.errors import BadInput, CommTimeout, PeerLost, TracekernError, what_is_lacking
from tracekern.launcher.rendezvous import join_ranks
from tracekern.launcher.watch import CLOSE, RUN, SET_UP, enter, is_launched
from tracekern.launcher.workload import REPORT, options_from, tell
from tracekern.moe.calls.call import BATCHES_BYTES, AfterStage, Calls, Variant
from tracekern.moe.families import EXPERT_KINDS, FAMILY_OF, reference_name
from tracekern.moe.reference import reference, sorted_all_to_all
from tracekern.moe.routing import Batch
from tracekern.moe.workload.calls_back_to_back import CallsBackToBack, least_us
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.reports import RankReport
from tracekern.moe.workload.sweep import Sweep
from tracekern.record.session import Capture, capture

MAX_BYTES = {"cpu": 1 << 30, "cuda": 1 << 29}
"""Limit of a rank's profile buffers in bytes; on a GPU all of it is pinned at once."""


def main() -> int:
    """Runs this rank. Returns its exit code."""
    # Until there are records to save, Ctrl-C ends the process at once, even while it waits for the others in C++.
    if this_resident() is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank = rank_of_thread()
    try:
        enter(SET_UP)
        report = _run_rank(options_from("TRACEKERN_MOE_RUN", MoeRun))
    except TracekernError as error:
        fault = error.fault if isinstance(error, CommTimeout) else {}
        report = RankReport(
            rank=rank,
            ok=False,
            error=str(error),
            exit_code=error.exit_code,
            followed=isinstance(error, PeerLost) or fault.get("cause") == "peer_aborted",
            waited_for=fault.get("peer", -1),
            has_no_room=isinstance(error, _NoRoom),
        )
    except (MemoryError, OSError, RuntimeError) as error:
        if not (lacks := what_is_lacking(error)):
            raise
        lacks += ": fewer ranks or tokens, or a smaller hidden"
        report = RankReport(rank=rank, ok=False, error=f"rank {rank}: {lacks}", exit_code=2)
    if is_launched():
        tell(REPORT, json.dumps(dataclasses.asdict(report)))
    elif report.error:  # else the error is in the report and is printed once for all ranks
        sys.stderr.write(report.error + "\n")
    return report.exit_code


vars(main)["at_interrupt"] = signal.SIG_DFL


class _NoRoom(BadInput):
    """The ranks cannot be resident on one GPU."""


def _run_rank(options: MoeRun) -> RankReport:
    torch.set_num_threads(1)
    is_resident = this_resident() is not None
    if options.ranks > 1 and not is_resident:
        join_ranks()
    backend = _choose_backend(options)
    group = Group.discover()
    if group.num_ranks != options.ranks:
        raise BadInput(f"{group.num_ranks} ranks were started, the run is for {options.ranks}")
    if backend == "cpu":
        group.refuse_together(_why_no_room(options))
    if backend != "cpu" and not is_resident:
        # Not on the CPU: Python runs no handler while a kernel runs on this thread, which may take its time limit.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.sweep_blocks:
        return _sweep(options, group, backend)
    is_host_driven = backend == "cpu" if options.host_driven is None else options.host_driven
    try:
        variant = _prepare(options, group, backend, is_host_driven)
    except BadInput as error:
        raise _NoRoom(str(error)) if is_resident and not options.hosts else error from None
    directory = os.environ.get("TRACEKERN_MOE_CAPTURE", "")
    make_calls = Calls if is_host_driven else CallsBackToBack
    with _capture(options, directory, variant.comm) as capture:
        enter(RUN)
        calls = make_calls(options, group.rank, backend, variant, capture)
        calls.prepare()
        with _torch_profile(options, capture, backend, calls.warm_up):
            calls.run()
        enter(CLOSE)
        footprint = capture.footprint_bytes if capture is not None else 0
    if dist.is_initialized():
        dist.destroy_process_group()
    return dataclasses.replace(
        _checked(options, group.rank, calls.wrong_elements, calls.num_checked),
        backend=backend,
        tokens=calls.num_tokens,
        family_options=variant.options,
        iteration_ms=tuple(calls.times_ms),
        is_host_driven=is_host_driven,
        least_call_us=0.0 if backend == "cpu" or is_resident else least_us(options),
        footprint_bytes=footprint,
    )


def _sweep(options: MoeRun, group: Group, backend: str) -> RankReport:
    enter(RUN)
    sweep = Sweep(options, group, backend, lambda chosen: _prepare(chosen, group, backend))
    try:
        sweep.run()
    except BadInput as error:
        raise _NoRoom(str(error)) if this_resident() is not None else error from None
    enter(CLOSE)
    if dist.is_initialized():
        dist.destroy_process_group()
    report = _checked(options, group.rank, sweep.wrong_elements, sweep.num_checked)
    choices = tuple(map(dataclasses.asdict, sweep.choices))
    return dataclasses.replace(report, backend=backend, sweep=choices, is_host_driven=False)


def _checked(options: MoeRun, rank: int, wrong: int, num_checked: int) -> RankReport:
    """Returns the report of a rank that came to its end. wrong: elements of its results."""
    error = f"rank {rank}: {wrong} elements differ from {reference_name(options.variant)}" if wrong else ""
    return RankReport(
        rank, ok=not wrong, error=error, exit_code=1 if wrong else 0, wrong_elements=wrong, num_checked=num_checked
    )


def _why_no_room(options: MoeRun) -> str:
    """Returns what memory this host lacks for a run on the CPU backend; "" if there is room."""
    family = FAMILY_OF.get(options.variant)
    heap_bytes, own_bytes = (0, 0)
    if family is not None:
        heap_bytes, own_bytes = family.memory(options.variant, options.shape, options.family_options)
    rows = family.expert_rows if family is not None else "packed"
    of_experts = EXPERT_KINDS[options.expert].tensor_bytes(options.shape, options.intermediate, rows)
    own_bytes += 2 * of_experts  # of the call and its reference
    own_bytes += 2 * heap_bytes if options.hosts else 0  # see tracekern.comm.network
    lacks = shortage(heap_bytes, own_bytes + BATCHES_BYTES, options.ranks)
    return lacks and f"run moe {lacks}"


def _choose_backend(options: MoeRun) -> str:
    """Returns "cpu" or "cuda". With fewer GPUs than ranks, ranks share GPUs. Raises BadInput if there is no GPU."""
    missing = why_no_gpu()
    num_gpus = 0 if missing else torch.cuda.device_count()
    has_room = num_gpus >= options.ranks or this_resident() is not None
    if options.is_for_cpu or (options.backend == "auto" and not has_room):
        return "cpu"
    if num_gpus == 0:
        raise BadInput(f"{missing}; take the backend cpu")
    gpu = local_rank() % num_gpus
    try:
        torch.cuda.set_device(gpu)
    except RuntimeError as error:  # such as a driver that is too old for torch
        why = str(error).partition("\n")[0]
        raise BadInput(f"torch cannot use GPU {gpu}: {why}; or take the backend cpu") from None
    return "cuda"


def _prepare(options: MoeRun, group: Group, backend: str, is_host_driven: bool = True) -> Variant:
    shape, experts, timeout_s = options.shape, options.draw_experts().to(backend), options.timeout_ms / 1e3
    if options.variant in FAMILY_OF:
        family = FAMILY_OF[options.variant]
        pipeline = family.make_pipeline(
            group,
            shape,
            options.variant,
            timeout_s=timeout_s,
            num_blocks=options.blocks,
            warps_per_block=options.warps,
            backend=backend,
            **({"stage_blocks": options.stage_blocks} if options.stage_blocks else {}),
            **({"hosts": options.hosts} if options.hosts else {}),
            **options.family_options,
            **({} if is_host_driven else family.queue_options),
        )
        if options.slow_link is not None:
            nodes = pipeline.options.get("nodes") or options.num_link_nodes
            pipeline.comm.set_slow_link(options.slow_link, nodes)
        pipeline.late_us = options.late_us if group.rank == options.late_rank else 0
        if pipeline.comm.network and group.rank == options.late_proxy:
            pipeline.comm.network.set_late(options.late_us)

        def start(
            batch: Batch,
            capture: Capture | None,
            out: torch.Tensor | None = None,
            after_stage: AfterStage | None = None,
        ) -> Any:
            call = batch.x, batch.topk_idx, batch.topk_weights, experts
            return pipeline(*call, out=out, capture=capture, after_stage=after_stage)

        chosen = {option.name: pipeline.options[option.name] for option in family.options_of(options.variant)}
        return Variant(start, pipeline.synchronize, pipeline.comm, chosen, pipeline.grid)
    comm = Communicator(group, _core.heap_control_bytes, timeout_s, backend)
    if options.variant == "sorted":
        return Variant(lambda batch, *_: sorted_all_to_all(batch, experts, shape), comm.synchronize, comm, {})
    return Variant(lambda batch, *_: reference(batch, experts), comm.synchronize, comm, {})


def _capture(options: MoeRun, directory: str, comm: Communicator) -> Any:
    if not directory:
        return contextlib.nullcontext()
    return capture(
        directory,
        records_per_track=options.records_per_track,
        keep=options.keep,
        clock=options.clock,
        detail=options.capture_detail,
        every=options.every,
        settings=options.workload,
        command=options.command,
        device=comm.device,
        max_bytes=MAX_BYTES[comm.device.backend],
    )


@contextlib.contextmanager
def _torch_profile(options: MoeRun, capture: Capture | None, backend: str, warm_up: Callable[[], object]) -> Any:
    """Adds torch.profiler's lanes of the block, on GPUs with the kernels as CUPTI saw them.

    warm_up: runs a call before the block, outside the profile. A profiler's first launches take the host up to a second
    or two, differently on each rank, and all ranks would seem to wait for the slowest.
    """
    if not options.torch_profiler or capture is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile, schedule

    # The warning says that only one cycle is kept; there is only one.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if backend == "cuda" else [])
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1)) as profiler:
        warm_up()
        profiler.step()
        yield
    capture.add_torch_profile(profiler)


if __name__ == "__main__":
    sys.exit(main())
