"""What happens to a GPU and its records when kernels wait in vain; each scenario needs processes of its own.

    python -m tests.gpu_flight SCENARIO SINK DIRECTORY

Starts the ranks of the scenario by our launcher, ends them after a time limit, and prints as JSON how they ended and
what they left in DIRECTORY/rank_<r>.json. test_gpu_flight.py looks at that and at the capture in DIRECTORY/capture.
With fewer GPUs than ranks these are resident on one: a trap, or the end of the process, then hits all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tracekern.comm.devices.this_thread import this_resident
from tracekern.comm.ranks import resident
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CommTimeout, DeviceLost
from tracekern.launcher.launch import launch_ranks
from tracekern.launcher.spawner import Spawner
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.reference import reference
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.record import session as sessions
from tracekern.record.session import capture
from tracekern.segment import keeper
from tracekern.segment.snapshot import snapshot_run

NUM_BATCHES = 4
RING_SLOTS = 4
NUM_RECYCLED = 300
LIMIT_S = 40.0
LATE_S = 1.0
"""How long resident ranks hold their kernels back for one that stays away, as it does here on purpose."""
BACKEND = "cuda"
TARGET = "tests.gpu_flight:run_scenario"


class Workload:
    """A pipeline of this rank, and calls of it that are compared with the reference on the device."""

    def __init__(self, **options: Any) -> None:
        if this_resident() is None:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            if int(os.environ["WORLD_SIZE"]) > 1:
                torch.distributed.init_process_group("gloo")
        resident.LATE_S = LATE_S
        self.group = Group.discover()
        shape = MoeShape(self.group.num_ranks, 32, 8 * self.group.num_ranks, 4, 1024, "bf16")
        experts = draw_experts(shape)
        batches = [
            draw_batch(shape, seed=5, rank=self.group.rank, iteration=iteration, routing="uniform", uneven=True)
            for iteration in range(NUM_BATCHES)
        ]
        self.wanted = [reference(batch, experts).to(BACKEND).view(torch.int16) for batch in batches]
        self.batches, self.experts = [batch.to(BACKEND) for batch in batches], experts.to(BACKEND)
        grid = {"num_blocks": 16, "warps_per_block": 8}
        self.pipeline = P2PPipeline(self.group, shape, "balanced", **grid, backend=BACKEND, **options)
        self.comm = self.pipeline.comm

    def inputs(self, iteration: int) -> tuple[torch.Tensor, ...]:
        batch = self.batches[iteration % NUM_BATCHES]
        return batch.x, batch.topk_idx, batch.topk_weights, self.experts

    def call(self, iteration: int, session: Any = None) -> torch.Tensor:
        """Number of wrong elements, on the device."""
        out = self.pipeline(*self.inputs(iteration), capture=session)
        return (out.view(torch.int16) != self.wanted[iteration % NUM_BATCHES]).sum()

    def fail(self, session: Any) -> CommTimeout:
        """Rank 0 alone makes a call, and gives up."""
        try:
            self.call(1, session)
            self.pipeline.synchronize()
        except CommTimeout as error:
            return error
        raise AssertionError("nobody gave up")


def flight(name: str = "capture", **options: Any) -> Any:
    """A flight recorder into DIRECTORY/name, with the SINK of the scenario."""
    how = {"max_bytes": 1 << 27, "keep": "last", "sink": os.environ["FLIGHT_SINK"], **options}
    return capture(Path(os.environ["FLIGHT_DIR"], name), **how)


def leave(rank: int, found: dict[str, Any]) -> int:
    Path(os.environ["FLIGHT_DIR"], f"rank_{rank}.json").write_text(json.dumps(found))
    return 0


def time_out() -> int:
    """Rank 1 stays away; rank 0 gives up and is refused; after a reset 1,000 calls are right."""
    workload = Workload(timeout_s=0.5)
    rank, found = workload.group.rank, {"said": [], "fault": {}}
    with flight(device=workload.comm.device) as session:
        workload.call(0, session)
        workload.pipeline.synchronize()
        for _ in range(2 if rank == 0 else 0):
            error = workload.fail(session)
            found["said"].append(str(error))
            found["fault"] = error.fault
    workload.comm.set_timeout(10.0)
    workload.pipeline.reset()
    wrong = sum(workload.call(iteration) for iteration in range(1000))
    workload.pipeline.synchronize()
    return leave(rank, {**found, "wrong": int(wrong)})


def trap() -> int:
    """Rank 1 stays away and the kernel of rank 0 traps: its device is gone, its capture is not.

    If rank 1 is resident beside rank 0, its device is gone as well.
    """
    workload = Workload(timeout_s=0.5, on_timeout="trap")
    rank, found = workload.group.rank, {"said": []}
    with flight(device=workload.comm.device) as session:
        workload.call(0, session)
        workload.pipeline.synchronize()
        for _ in range(2 if rank == 0 else 0):
            found["said"].append(str(workload.fail(session)))
        meet_and_ask(workload, found)
    try:
        workload.pipeline.reset()
    except DeviceLost as error:
        found["reset"] = str(error)
    return leave(rank, found)


def meet_and_ask(workload: Workload, found: dict[str, Any]) -> None:
    """Rank 1 asks for its device when rank 0 has lost its own."""
    workload.group.barrier()
    if workload.group.rank == 1:
        try:
            workload.comm.synchronize()
        except DeviceLost as error:
            found["said"].append(str(error))


def somebody_elses_trap() -> int:
    """A kernel that is not ours ends the context of rank 0, while one of ours waits in vain."""
    return trap_beside(is_noticed=True)


def trap_while_closing() -> int:
    """The same, but captures close before anybody has asked the device: that of rank 1 even before the trap."""
    return trap_beside(is_noticed=False)


def trap_beside(is_noticed: bool) -> int:
    workload = Workload(timeout_s=5.0)
    rank, found = workload.group.rank, {"said": []}
    beside, row = torch.cuda.Stream(), torch.zeros(1, dtype=torch.long, device="cuda")
    outside = row + 9
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):  # loads the kernels, which could later wait for the one that waits in vain
        torch.cuda._sleep(1)
        row[row]
    beside.synchronize()
    with flight(device=workload.comm.device) as session:
        workload.call(0, session)
        workload.pipeline.synchronize()
        if rank == 0:
            workload.call(1, session)
            with torch.cuda.stream(beside):
                torch.cuda._sleep(10**9)  # cycles: half a second
                row[outside]
        elif not is_noticed:
            torch.cuda._sleep(5 * 10**9)  # longer than until the trap
        if rank == 0 and is_noticed:
            try:
                torch.cuda.current_stream().synchronize()
            except RuntimeError as error:
                found["said"].append(str(error).splitlines()[0])
        if is_noticed:
            meet_and_ask(workload, found)
    return leave(rank, found)


def calls_without_end() -> int:
    """Until rank 1 is killed in the middle of it, and rank 0 gives up. Resident ranks are killed together."""
    workload = Workload(timeout_s=0.5)
    directory, rank = Path(os.environ["FLIGHT_DIR"]), workload.group.rank
    try:
        with flight(device=workload.comm.device, records_per_track=32) as session:
            for iteration in range(100_000):
                workload.call(iteration, session)
                if iteration == 50:
                    (directory / f"ready_{rank}").touch()
                workload.pipeline.synchronize()
    except CommTimeout as error:
        return leave(rank, {"said": [str(error)]})
    return 1


def late_rank() -> int:
    """Rank 0 waits in a kernel for rank 1, which comes when somebody has taken a snapshot of both."""
    workload = Workload(timeout_s=LIMIT_S)
    directory, rank = Path(os.environ["FLIGHT_DIR"]), workload.group.rank
    with flight(device=workload.comm.device, records_per_track=64) as session:
        wrong = [workload.call(0, session)]
        workload.pipeline.synchronize()
        if rank == 0:
            wrong.append(workload.call(1, session))
            time.sleep(0.5)  # its kernel waits now
        (directory / f"ready_{rank}").write_text(session.run_id)
        if rank == 1:
            wait_for([directory / "go"])
            wrong.append(workload.call(1, session))
        workload.pipeline.synchronize()
    return leave(rank, {"wrong": int(sum(wrong))})


def wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.01)


def record_past_the_end(workload: Workload, name: str, **options: Any) -> int:
    """Launches until regions are used again; the number of wrong elements."""
    wrong = []
    with flight(
        name, device=workload.comm.device, records_per_track=RING_SLOTS, max_bytes=1 << 22, **options
    ) as session:
        for iteration in range(NUM_RECYCLED):
            wrong.append(workload.call(iteration, session))
            workload.pipeline.synchronize()
    return int(sum(wrong))


def keep_last() -> int:
    """The same calls with room for all records, and with a ring; then more launches than there is room for."""
    workload = Workload(timeout_s=5.0)
    for name, options in (
        ("first", {"records_per_track": 1 << 10, "keep": "first"}),
        ("capture", {"keep": "last", "records_per_track": RING_SLOTS}),
    ):
        with flight(name, device=workload.comm.device, **options) as session:
            for iteration in range(3):
                workload.call(iteration, session)
            workload.pipeline.synchronize()
    return leave(0, {"wrong": record_past_the_end(workload, "recycled")})


def hidden_device() -> int:
    """The environment hides all GPUs once CUDA runs; the keeper finds its own all the same."""
    workload = Workload(timeout_s=5.0)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return leave(0, {"wrong": record_past_the_end(workload, "capture")})


def keeper_that_fails() -> int:
    """It does not come in time, and what it was to hold is given back."""
    workload = Workload(timeout_s=5.0)
    free_before, _ = torch.cuda.mem_get_info()
    keeper.START_TIMEOUT_S = 0.001
    said = ""
    try:
        with flight(device=workload.comm.device, max_bytes=1 << 30):
            pass
    except BadInput as error:
        said = str(error)
    free_after, _ = torch.cuda.mem_get_info()
    return leave(0, {"said": said, "lost_bytes": free_before - free_after})


def beside_a_graph_capture() -> int:
    """Another thread captures a graph, in the mode that forbids all threads to query, while regions are used again."""
    workload = Workload(timeout_s=5.0)
    x, inputs = torch.ones(8, device="cuda"), workload.inputs(0)
    out = workload.pipeline(*inputs)
    torch.cuda.synchronize()
    is_capturing, is_recorded = threading.Event(), threading.Event()
    graph = torch.cuda.CUDAGraph()

    def capture_graph() -> None:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            x.add_(1)
            is_capturing.set()
            is_recorded.wait(LIMIT_S)

    thread = threading.Thread(target=capture_graph)
    with flight(device=workload.comm.device, records_per_track=RING_SLOTS, max_bytes=1 << 22) as session:
        thread.start()
        is_capturing.wait(LIMIT_S)
        for _ in range(NUM_RECYCLED):
            workload.pipeline(*inputs, out=out, capture=session)
            time.sleep(0.001)  # nothing may wait for the device now
        brackets = session.device.clock.read_brackets(100)
        is_recorded.set()
        thread.join()
        workload.pipeline.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    return leave(0, {"x": float(x[0]), "brackets": len(brackets)})


def busy_at_the_end() -> int:
    """A kernel of nobody's runs on and on when the capture closes."""
    workload = Workload(timeout_s=5.0)
    sessions.CLOSE_TIMEOUT_S = 1.0
    with flight(device=workload.comm.device, records_per_track=1 << 10) as session:
        wrong = int(workload.call(0, session))
        torch.cuda._sleep(10_000_000_000)  # 5 s
    is_busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    again = torch.ones(8, device="cuda").sum()  # the GPU is as good as before
    return leave(0, {"wrong": wrong, "is_busy": is_busy, "sum": float(again)})


def another_device() -> int:
    """The thread turns to another GPU before the capture closes."""
    workload = Workload(timeout_s=5.0)
    said = []
    with flight(device=workload.comm.device, records_per_track=1 << 10) as session:
        for iteration in range(3):
            workload.call(iteration, session)
        torch.cuda.set_device(1)
        wrong = int(workload.call(3, session))
        try:
            workload.pipeline(*(tensor.to("cuda:1") for tensor in workload.inputs(0)))
        except BadInput as error:
            said.append(str(error))
    return leave(0, {"wrong": wrong, "said": said})


def refusals() -> int:
    """What preflight finds on this machine, and a heap that no GPU holds."""
    from tracekern.comm.communicator import Communicator
    from tracekern.comm.devices.cuda import collect_facts
    from tracekern.comm.devices.preflight import judge

    torch.cuda.set_device(0)
    facts = collect_facts(1 << 20)
    found: dict[str, Any] = {"name": facts.name, "driver": facts.driver_version, "free": facts.free_bytes}
    found["verdict"] = [judge({0: facts}).refusal, *judge({0: facts}).warnings]
    found["reachable"] = dict(facts.reachable)
    try:
        Communicator(Group(0, 1), 1 << 50, 1.0, "cuda")
    except BadInput as error:
        found["too_large"] = str(error)
    comm = Communicator(Group(0, 1), 1 << 20, 1.0, "cuda")
    comm.barrier()
    return leave(0, found)


def no_descriptors() -> int:
    """As where the driver of rank 1 exports no memory by file descriptor: all share their heaps by CUDA IPC."""
    from tracekern.comm.devices import cuda

    collect = cuda.collect_facts
    cuda.collect_facts = lambda num_bytes: dataclasses.replace(
        collect(num_bytes), exports_memory=os.environ["RANK"] != "1"
    )
    workload = Workload(timeout_s=5.0)
    with flight(device=workload.comm.device, records_per_track=1 << 10) as session:
        wrong = sum(workload.call(iteration, session) for iteration in range(20))
        workload.pipeline.synchronize()
    return leave(workload.group.rank, {"wrong": int(wrong), "handle": len(workload.comm.native.heap_handle())})


SCENARIOS: dict[str, tuple[Callable[[], int], int]] = {
    scenario.__name__: (scenario, num_ranks)
    for scenario, num_ranks in (
        (time_out, 2),
        (trap, 2),
        (somebody_elses_trap, 2),
        (trap_while_closing, 2),
        (calls_without_end, 2),
        (late_rank, 2),
        (keep_last, 1),
        (hidden_device, 1),
        (keeper_that_fails, 1),
        (beside_a_graph_capture, 1),
        (busy_at_the_end, 1),
        (another_device, 1),
        (no_descriptors, 2),
        (refusals, 1),
    )
}
"""By name, each with the number of its ranks."""


def run_scenario() -> int:
    """One rank; started by play()."""
    scenario, _ = SCENARIOS[os.environ["FLIGHT_SCENARIO"]]
    return scenario()


def play(scenario: str, sink: str, directory: Path, spawner: Spawner | None = None) -> dict[str, Any]:
    """How the ranks of a scenario ended, and what they found. spawner: of TARGET, shares the import of torch."""
    num_ranks = SCENARIOS[scenario][1]
    is_resident = 1 < num_ranks > torch.cuda.device_count()
    pids: dict[int, int] = {}
    lines: list[str] = []
    ready = [directory / f"ready_{rank}" for rank in range(2)]

    def kill_when_ready() -> None:
        wait_for(ready)
        os.kill(pids[0 if is_resident else 1], signal.SIGKILL)

    def look_when_ready() -> None:
        wait_for(ready)
        time.sleep(0.2)  # until the name of the run is in the file
        try:
            snapshot_run(ready[0].read_text(), directory / "now")
        finally:
            (directory / "go").touch()

    meanwhile = {"calls_without_end": kill_when_ready, "late_rank": look_when_ready}.get(scenario)
    if meanwhile is not None:
        threading.Thread(target=meanwhile, daemon=True).start()
    exits = launch_ranks(
        num_ranks,
        spawner or TARGET,
        env={"FLIGHT_SCENARIO": scenario, "FLIGHT_DIR": str(directory), "FLIGHT_SINK": sink},
        timeout_s=LIMIT_S,
        on_line=lambda rank, line: lines.append(f"[rank {rank}] {line}"),
        on_start=pids.__setitem__,
        resident=is_resident,
    )
    reports = [directory / f"rank_{rank}.json" for rank in range(num_ranks)]
    return {
        "codes": [ended.returncode for ended in exits],
        "ranks": [json.loads(path.read_text()) if path.exists() else None for path in reports],
        "lines": lines,
        "is_resident": is_resident,
    }


def main() -> int:
    scenario, sink, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3]).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(json.dumps(play(scenario, sink, directory)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
