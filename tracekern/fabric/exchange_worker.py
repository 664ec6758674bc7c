"""One rank of `tracekern run fabric`. Reads its options from the environment; see tracekern/fabric/exchange.py."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from tracekern.comm.ranks.group import Group
from tracekern.errors import TracekernError
from tracekern.fabric.done import DoneFlag
from tracekern.fabric.engine import MemoryRegionDescriptor, Net, TransferEngine
from tracekern.fabric.exchange import CAPTURE, OPTIONS, Exchange, ExchangeReport
from tracekern.fabric.requests import PageIndices
from tracekern.launcher.rendezvous import join_ranks
from tracekern.launcher.watch import CLOSE, RUN, SET_UP, enter
from tracekern.launcher.workload import PROGRESS, REPORT, options_from, tell
from tracekern.record.session import Capture, capture


def main() -> int:
    """Runs this rank. Returns its exit code."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        enter(SET_UP)
        report = _run(options_from(OPTIONS, Exchange))
    except TracekernError as error:
        report = ExchangeReport(rank, f"rank {rank}: {error}", error.exit_code)
    tell(REPORT, json.dumps(dataclasses.asdict(report)))
    return report.exit_code


vars(main)["at_interrupt"] = signal.SIG_DFL


def _run(options: Exchange) -> ExchangeReport:
    torch.set_num_threads(1)
    join_ranks()
    group, directory = Group.discover(), os.environ.get(CAPTURE, "")
    settings = {key: value for key, value in dataclasses.asdict(options).items() if key != "command"}
    with _Pages(options, group) as pages:
        pages.write_all(-1, None)  # peers meet, and memory gets its pages
        recording: Any = contextlib.nullcontext()
        if directory:
            recording = capture(directory, device="cpu", settings=settings, command=options.command)
        with recording as open_capture:
            enter(RUN)
            with pages.engine.traced(open_capture, options.records) if directory else contextlib.nullcontext():
                for iteration in range(options.iterations):
                    pages.write_all(iteration, open_capture)
                    tell(PROGRESS, f"{iteration + 1} {options.iterations}")
            enter(CLOSE)
    dist.destroy_process_group()
    wrong = pages.wrong_bytes
    error = f"rank {group.rank}: {wrong:,} bytes are not what was written" if wrong else ""
    return ExchangeReport(group.rank, error, int(bool(wrong)), wrong, tuple(pages.times_ms))


class _Pages:
    """This rank's engine and memory: pages for each other rank, and from each."""

    def __init__(self, options: Exchange, group: Group) -> None:
        self._options, self._group = options, group
        self.wrong_bytes, self.times_ms = 0, list[float]()
        nets = [
            Net(options.provider, f"127.0.0.{number + 1}" if options.provider == "tcp" else "")
            for number in range(options.domains)
        ]
        self.engine = TransferEngine.builder().add_domains(nets).connect_limit(options.timeout_s).build()
        self._sent = torch.zeros(options.bytes_to_each, dtype=torch.uint8)
        self._received = torch.zeros(options.ranks, options.bytes_to_each, dtype=torch.uint8)
        self._src, _ = self.engine.register_tensor(self._sent)
        _, own = self.engine.register_tensor(self._received)
        told = group.all_gather(own.to_bytes(), "descriptors of an exchange")
        self._dst = [MemoryRegionDescriptor(descriptor) for descriptor in told]

    def __enter__(self) -> _Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def write_all(self, iteration: int, open_capture: Capture | None) -> None:
        """Writes to all other ranks, waits for what they write, and checks it."""
        options, rank = self._options, self._group.rank
        imm = iteration + 1
        self._sent.fill_(_value(rank, iteration))
        counter = self.engine.make_imm_counter(imm)
        self._group.barrier()  # nobody writes what another one still checks
        start_ns = time.monotonic_ns()
        named = open_capture.range(f"iteration {iteration}") if open_capture else contextlib.nullcontext()
        with named:
            if rank == options.late_rank and iteration >= 0:
                time.sleep(options.late_us / 1e6)
            ends = [self._submit((rank + step) % options.ranks, imm) for step in range(1, options.ranks)]
            counter.wait((options.ranks - 1) * options.pages, options.timeout_s)
        if iteration >= 0:
            self.times_ms.append((time.monotonic_ns() - start_ns) / 1e6)
        for end in ends:
            end.wait(options.timeout_s)
        self.engine.remove_imm_count(imm)
        for peer in range(options.ranks):
            if peer != rank:
                self.wrong_bytes += int((self._received[peer] != _value(peer, iteration)).sum())
        self._group.barrier()

    def _submit(self, peer: int, imm: int) -> DoneFlag:
        options, done = self._options, DoneFlag()
        src = PageIndices(range(options.pages), options.page_bytes)
        dst = PageIndices(range(options.pages), options.page_bytes, self._group.rank * options.bytes_to_each)
        self.engine.submit_paged_writes(self._src, src, self._dst[peer], dst, options.page_bytes, imm=imm, on_done=done)
        return done


def _value(rank: int, iteration: int) -> int:
    """What all bytes of a rank's pages are in an iteration."""
    return (31 * rank + 7 * iteration + 1) % 251
