"""Where a capture goes whose directory may hold evidence: the same place on all ranks of its run.

Ranks that exchange messages follow rank 0. Ranks known from the environment alone find each other's capture by the
run's name: in the lock of a directory, while one records there, and in the dumps of those that have ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracekern.comm.ranks.group import Group
from tracekern.comm.ranks.node import directory_id
from tracekern.dump.attempts import metadata_of, place_of, places_in
from tracekern.dump.format import ranks_of, run_name
from tracekern.formatting import ranks
from tracekern.record.setup import check_run_id, differing_directories
from tracekern.segment.directory_lock import DirectoryLock, run_writing_to

_RECORDING = "TRACEKERN_RECORDING"
"""Set by `tracekern record`, to a name for this use of it: its programs do not replace each other's captures."""

_log = logging.getLogger("tracekern")
_Dumps = list[dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    """The run, the rank and the recording that a capture belongs to."""

    run_id: str = ""
    rank: int = 0
    recording: str = ""

    @classmethod
    def of_capture(cls, directory: Path, run_id: str, rank: int) -> Claim:
        """Returns that of a capture that opens in `directory`; of the recording only where that asked for it."""
        asked = os.environ.get("TRACEKERN_CAPTURE", "")
        return cls(run_id, rank, os.environ.get(_RECORDING, "") if Path(asked) == directory else "")

    def about(self) -> dict[str, str]:
        """Returns what a dump says of the recording that it is of; {} for none."""
        return {"recording": self.recording} if self.recording else {}


def choose_attempt(directory: Path, claim: Claim) -> tuple[int, str]:
    """Returns the attempt that this run's other ranks have begun, else the next one that would replace no evidence of
    another run; and why it is not the first.
    """
    if (begun := _begun(directory, claim)) is not None:
        return begun, ""
    attempt, why = _restarts(), ""
    if attempt:
        why = f"{directory}: attempt {attempt} of this job is captured into {place_of(directory, attempt)}"
    while kept := _evidence(metadata_of(before := place_of(directory, attempt)), claim):
        attempt += 1
        why = f"{before}: keeps {kept}: this capture goes to {place_of(directory, attempt)}"
    return attempt, why


def agree_on_attempt(directory: Path, claim: Claim, group: Group, run_id: str) -> tuple[Path, str, bool]:
    """Returns where this rank writes, the run's name, the same on all ranks, and whether all write to one directory.

    Collective. Warns on the first rank of why it is a new attempt, and of directories that differ.
    """
    attempt, why = choose_attempt(directory, claim) if group.is_connected else (0, "")
    own = run_id, attempt, str(directory), directory_id(directory)
    names, attempts, places, ids = zip(*group.all_gather(own, "the opening of a capture"), strict=True)
    ranks_of_group = group.world_ranks
    for told in filter(None, (why, differing_directories(places, ranks_of_group))) if group.rank == 0 else ():
        _log.warning("%s", told)
    run_id = check_run_id(names[0], ranks_of_group[0])
    return place_of(directory, int(attempts[0])), run_id, len(set(ids)) == 1


def lock_attempt(directory: Path, claim: Claim) -> tuple[DirectoryLock, Path]:
    """Chooses the attempt of a rank that knows the others by name alone, and takes its lock. Returns both.

    Another rank may have looked a moment earlier, and begun to replace what was whole then. Each looks again once its
    own choice can be seen; of two choices the first place counts.
    """
    while True:
        attempt, why = choose_attempt(directory, claim)
        place = place_of(directory, attempt)
        lock = DirectoryLock(place, claim.run_id)
        begun = _begun(directory, claim)
        if begun is None or begun >= attempt:
            if why:
                _log.warning("%s", why)
            return lock, place
        lock.release()


def next_attempt(directory: Path) -> Path:
    """Returns the directory in which a capture into `directory` replaces no evidence. Tells where it is another."""
    attempt, why = choose_attempt(directory, Claim())
    if why:
        _log.warning("%s", why)
    return place_of(directory, attempt)


def _restarts() -> int:
    """Returns how often torchrun has started this job again. Ranks of tracekern's launcher are none of its job."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isdecimal() and os.environ.get("TRACEKERN_KEEP_SEGMENT") != "1" else 0


def _begun(directory: Path, claim: Claim) -> int | None:
    """Returns the first attempt that other ranks of this run write to or have written to; None if there is none."""
    for attempt, place in places_in(directory) if claim.run_id else ():
        dumps = metadata_of(place)
        own = {metadata["rank"] for metadata in dumps if metadata["run_id"] == claim.run_id}
        is_written = run_writing_to(place) == run_name(claim.run_id)
        # Where this rank has a dump of that name, an earlier run had the name.
        if (is_written or (own and claim.rank not in own)) and not _fault(_others(dumps, claim)):
            return attempt
    return None


def _others(dumps: _Dumps, claim: Claim) -> dict[str, _Dumps]:
    """Returns the dumps of other runs; of an earlier run of this name, too."""
    runs: dict[str, _Dumps] = {}
    for metadata in dumps:
        runs.setdefault(str(metadata["run_id"]), []).append(metadata)
    if claim.rank not in {metadata["rank"] for metadata in runs.get(claim.run_id, ())}:
        runs.pop(claim.run_id, None)
    return runs


def _fault(runs: dict[str, _Dumps]) -> str:
    with_fault = (run for run, dumps in runs.items() if any(map(_has_fault, dumps)))
    return "".join(f"the fault of run {run}" for run in list(with_fault)[:1])


def _has_fault(metadata: dict[str, Any]) -> bool:
    return bool(metadata.get("fault") or metadata.get("fault_text"))


def _evidence(dumps: _Dumps, claim: Claim) -> str:
    """Returns what must not be replaced of other runs: a fault, what some ranks left, or what another program of this
    recording captured; "" for none."""
    runs = _others(dumps, claim)
    if fault := _fault(runs):
        return fault
    for run, of_run in runs.items():
        if open_ranks := _without_end(of_run):
            return f"what is left of run {run}, which {ranks(open_ranks)} did not end"
        if claim.recording and of_run[0].get("recording") == claim.recording:
            return f"what process {of_run[0].get('pid')} captured, under the same `tracekern record`"
    return ""


def _without_end(dumps: Iterable[dict[str, Any]]) -> list[int]:
    dumps = list(dumps)
    closed = {metadata["rank"] for metadata in dumps if metadata["state"] == "closed"}
    return sorted(set(ranks_of(dumps[0])) - closed)
