"""Checks a capture's arguments before anything is opened, and collects its opening metadata."""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tracekern.comm.ranks.meeting import id_of
from tracekern.environment import warn_of_unread
from tracekern.errors import BadInput
from tracekern.formatting import count, without_nan
from tracekern.host_clock import anchor_again, describe_host_clock, machine_id
from tracekern.record.claims import process_facts
from tracekern.record.overhead import overhead_ns
from tracekern.record.sinks import Sink

if TYPE_CHECKING:
    from tracekern.comm.devices.device import CaptureDevice
    from tracekern.comm.ranks.group import Group
    from tracekern.record.selection import Selection

_log = logging.getLogger("tracekern")
_MOST_NAMED = 4
_SURROGATE = re.compile("[\ud800-\udfff]")
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Setup:
    """Resources of a capture. Raises BadInput for values that cannot be used."""

    device: CaptureDevice | Literal["cpu", "cuda"] = "cpu"
    sink: Sink = "host"
    max_bytes: int = 1
    host_spans: int = 0
    clocks: bool = False
    preload: Sequence[Callable[[], None]] = ()
    group: Any = None
    """The ranks that capture; None: all."""

    def __post_init__(self) -> None:
        for name, value, low, bits in (("max_bytes", self.max_bytes, 1, 48), ("host_spans", self.host_spans, 0, 32)):
            if not isinstance(value, Integral) or value < low or value >> bits:
                raise BadInput(f"{name}={value!r}: wanted a whole number from {low} to 2^{bits} - 1")
        if self.sink not in ("auto", "host", "device"):
            raise BadInput(f"sink={self.sink!r}: wanted 'auto', 'host' or 'device'")
        if not isinstance(self.preload, Sequence) or not all(map(callable, self.preload)):
            raise BadInput(f"preload={self.preload!r}: wanted a list of functions")


def used_device() -> Literal["cpu", "cuda"]:
    """Returns "cuda" if this process has used torch.cuda, else "cpu"."""
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_initialized() else "cpu"


def list_of_names(what: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the names as a tuple. None selects all and stays None; an empty list selects none.

    Raises BadInput for a string. what: names the argument in the message.
    """
    if names is None:
        return None
    listed: tuple[Any, ...] = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (None,)
    if not all(isinstance(name, str) for name in listed):
        raise BadInput(f"{what}={names!r}: wanted a list of names")
    return listed


def opening_metadata(
    run_id: str, group: Group, device: CaptureDevice, directory: Path, record_format: str
) -> dict[str, Any]:
    """Returns the metadata of a capture that opens, without capture()'s arguments.

    record_format: of the capture's launches.
    """
    from tracekern import __version__

    warn_of_unread()
    anchor_again()
    with device.active():
        cost_ns = overhead_ns(device.backend, device.name, record_format)
    return {
        "run_id": run_id,
        "rank": group.world_rank,
        "num_ranks": group.num_world_ranks,
        **({} if group.is_world else {"ranks": group.world_ranks}),
        "num_residents": group.num_residents,
        "node": platform.node(),
        "machine": machine_id(),
        "host_time": describe_host_clock(),
        "pid": os.getpid(),
        "process": process_facts(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        "tracekern": __version__,
        "backend": device.backend,
        "device": device.name,
        "note": device.note,
        "clock": device.clock.describe(),
        "overhead_ns": cost_ns,
        "directory": os.path.realpath(directory),
        "fault_names": device.fault_names,
    }


def make_run_id(ordinal: int, group: Group) -> str:
    """Returns the name of a run: that of TRACEKERN_RUN_ID, else a new one. ordinal: of the capture in this process.

    A group of the ranks has another name than all of them: two may capture at the same time.
    Raises BadInput for ranks that neither exchange messages nor have a name in common.
    """
    base = re.sub(r"[^A-Za-z0-9_-]", "_", os.environ.get("TRACEKERN_RUN_ID", ""))
    if base:
        base = base if group.is_world else f"{base}.g{id_of(group.world_ranks)}"
        return f"{base}.{ordinal}" if ordinal else base
    if not group.is_connected:
        raise BadInput(
            f"rank {group.rank} of {group.num_ranks} by environment alone: initialise torch.distributed before the "
            "capture, or start the ranks with tracekern's launcher; RANK=0 WORLD_SIZE=1 captures this process alone"
        )
    return f"{int(time.time()):x}-{secrets.token_hex(4)}"


def differing_directories(directories: Sequence[str], world_ranks: Sequence[int]) -> str:
    """Returns one line that names the directories of a capture's ranks where they differ; else ""."""
    if len(set(directories)) == 1:
        return ""
    ranks = {directory: world_ranks[directories.index(directory)] for directory in directories}
    named = [f"{directory} (rank {rank})" for directory, rank in list(ranks.items())[:_MOST_NAMED]]
    more = f" and {count(len(ranks) - _MOST_NAMED, 'other')}" if len(ranks) > _MOST_NAMED else ""
    where = f"all dumps go to that of rank {world_ranks[0]}, {directories[0]}"
    return f"the ranks of this run gave different directories: {', '.join(named)}{more}; {where}"


def is_text(name: object) -> bool:
    """Returns whether a dump can hold `name`: text without lone surrogates."""
    return isinstance(name, str) and not _SURROGATE.search(name)


def check_run_id(told: object, teller: int) -> str:
    """Returns a run's name as rank `teller` told it. Raises BadInput unless names of files can have it as a part."""
    if isinstance(told, str) and _RUN_ID.fullmatch(told):
        return told
    raise BadInput(f"rank {teller} names the run {str(told)[:100]!r}; wanted letters, digits, '-', '_' and '.'")


def check_built() -> None:
    """Raises NotBuilt, which says what to do, without the compiled part."""
    from tracekern import _core  # noqa: F401


def directory_of(path: str | Path) -> Path:
    """Returns the absolute path of a capture's directory. Raises BadInput for one that no directory can have."""
    if "\0" in str(path):
        raise BadInput(f"{str(path)!r}: has a zero byte; choose another directory")
    try:
        return Path(path).absolute()
    except OSError:  # of os.getcwd()
        raise BadInput(f"{path}: the working directory is gone; give an absolute path") from None


def about_run(selection: Selection, settings: dict[str, Any] | None, command: str | None) -> dict[str, Any]:
    """Returns the metadata of a capture that its arguments give.

    Raises BadInput for settings or a command that a dump cannot hold.
    """
    if not isinstance(command, str | None):
        raise BadInput(f"command={command!r}: wanted text")
    if not isinstance(settings, dict | None):
        raise BadInput(f"settings={settings!r}: wanted a dict of what JSON holds")
    try:
        json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise BadInput(f"settings={settings!r}: {error}; wanted a dict of what JSON holds") from None
    command = shlex.join(sys.argv) if command is None else command
    settings = without_nan(settings or {})
    chosen = {"keep": selection.keep, "detail": selection.detail, "roles": selection.roles}
    return chosen | {"settings": settings, "command": command}
