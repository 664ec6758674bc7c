"""Launches of a family's kernels: traced, behind each other on a stream, and together with those of resident ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern.comm.communicator import Communicator
from tracekern.errors import BadInput

if TYPE_CHECKING:
    from tracekern.record.session import Capture

Run = Callable[[Sequence[str], Sequence[int], int], None]
"""Launches stages with their descriptors on a stream."""


@dataclass(frozen=True)
class Kind:
    """What a capture is told of a kernel."""

    events: Any
    roles: tuple[str, ...]
    grid: int
    warps: int
    name: str = ""
    """On record, where it is not that of the stage: kernels of several stages may share one."""
    stream: int = 0
    """Where it is not that of the call."""


def describe(
    events: str,
    settings: Mapping[str, Any],
    bytes_of: Mapping[str, int | tuple[int, str]] | None = None,
    initial: Mapping[str, int] | None = None,
    **told: Any,
) -> str:
    """Returns the event table of kernels with what it cannot know itself: see tracekern/dump/event_table.py.

    bytes_of: event -> the bytes that a span moves or announces, or as many for each that a field counts. initial:
    channel -> what it holds before any signal. told: more of the table: `left_out`, `groups`, `group_field`.
    """
    table = json.loads(events) | {"settings": dict(settings)} | told
    for event in table["events"]:
        channel = event["channel"].split()
        if initial and channel and channel[0] in initial:
            event["channel"] = " ".join([*channel[:2], f"initial={initial[channel[0]]}", *channel[2:]])
        num_bytes = (bytes_of or {}).get(event["name"], 0)
        event["bytes"], event["bytes_of"] = num_bytes if isinstance(num_bytes, tuple) else (num_bytes, "")
    return json.dumps(table)


def check_capture(capture: Any, after_stage: Any = None) -> None:
    """Raises BadInput for what is no capture, or no function of the name of a kernel, where they are not None."""
    if capture is not None and not callable(getattr(capture, "launch", None)):
        raise BadInput(f"capture is {type(capture).__name__}; wanted that of `with tracekern.capture(...) as capture`")
    if after_stage is not None and not callable(after_stage):
        raise BadInput(f"after_stage is {type(after_stage).__name__}; wanted a function of the name of a kernel")


class Launches:
    """Starts kernels of one family on this rank, all with the same grid, and others between them."""

    def __init__(self, comm: Communicator, events: Any, roles: Sequence[str], grid: int, warps: int) -> None:
        """events, roles: of the family, for captures."""
        self._comm = comm
        self._own = Kind(events, tuple(roles), grid, warps)
        self._others: dict[str, Kind] = {}
        self.late_us = 0
        """How much later than its host this rank's next calls begin, to see how the others wait."""

    def describe_as(self, events: Any) -> None:
        """Sets the table of the family's kernels in the next calls."""
        self._own = dataclasses.replace(self._own, events=events)

    def add_stage(
        self, stage: str, events: Any, roles: Sequence[str], grid: int, warps: int, *, name: str = "", stream: int = 0
    ) -> None:
        """Tells of a kernel that is not the family's, or not like its others. name, stream: see Kind."""
        self._others[stage] = Kind(events, tuple(roles), grid, warps, name, stream)

    def start(
        self,
        stages: Sequence[str],
        run: Run,
        epoch: int,
        capture: Capture | None,
        after_stage: Callable[[str], None] | None = None,
    ) -> None:
        """Starts the kernels of a call, one after the other; on the CPU runs them.

        run: may be called from the thread of another resident rank. epoch: of the call, as records keep it.
        after_stage: called with the name of each kernel that was started. If it raises, the call is broken off.
        """
        if capture is not None and self._comm.network:
            self._comm.network.record(capture)
        if self._comm.device.backend == "cuda":
            with self._comm.device.active():
                self._start_on_gpu(stages, run, epoch, capture, after_stage)
        else:
            self._run_on_cpu(stages, run, epoch, capture, after_stage)

    def _run_on_cpu(
        self,
        stages: Sequence[str],
        run: Run,
        epoch: int,
        capture: Capture | None,
        after_stage: Callable[[str], None] | None,
    ) -> None:
        descriptor = self._descriptor(stages[0], epoch, capture, 0, ahead=False)
        with self._comm.one_call():  # entered late, as below
            self._comm.device.streams.delay(0, self.late_us * 1000)
            for idx, stage in enumerate(stages):
                if idx > 0:
                    descriptor = self._descriptor(stage, epoch, capture, 0, ahead=False)
                with self._comm.guarded():
                    run([stage], [descriptor], 0)
                if after_stage is not None:
                    after_stage(self.kind_of(stage).name or stage)

    def _start_on_gpu(
        self,
        stages: Sequence[str],
        run: Run,
        epoch: int,
        capture: Capture | None,
        after_stage: Callable[[str], None] | None,
    ) -> None:
        comm = self._comm
        stream = comm.device.streams.current()
        used = set[int]()
        descriptors = []
        for stage in stages:
            own = self.kind_of(stage).stream or stream
            descriptors.append(self._descriptor(stage, epoch, capture, own, ahead=own in used))
            used.add(own)
        with comm.one_call():  # entered late: a capture that refuses a launch before any kernel breaks no call off

            def run_some(first: int, last: int) -> None:
                if first == 0 and self.late_us:
                    comm.device.streams.delay(stream, self.late_us * 1000)
                run(stages[first:last], descriptors[first:last], stream)

            if after_stage is None:
                with comm.guarded():
                    comm.launch(len(stages), run_some)
                return
            for first, stage in enumerate(stages):

                def run_one(_: int, last: int, first: int = first) -> None:
                    run_some(first, first + last)

                with comm.guarded():
                    comm.launch(1, run_one)
                after_stage(self.kind_of(stage).name or stage)

    def kind_of(self, stage: str) -> Kind:
        """Returns what captures are told of a stage."""
        return self._others.get(stage, self._own)

    def _descriptor(self, stage: str, epoch: int, capture: Capture | None, stream: int, ahead: bool) -> int:
        if capture is None:
            return 0
        kind = self.kind_of(stage)
        launch = capture.launch(
            kind.name or stage,
            grid=kind.grid,
            warps=kind.warps,
            stream=stream,
            events=self._comm.of_members(kind.events),
            roles=kind.roles,
            epoch=epoch,
            ahead=ahead,
        )
        return launch.descriptor
