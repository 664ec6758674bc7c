"""`tracekern snapshot`: copies what the ranks of a job that runs, or hangs, have recorded so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracekern import formatting as words
from tracekern.cli import options
from tracekern.cli.commands.salvage import note_only_counted
from tracekern.cli.output import console, note, print_json, suggest, working
from tracekern.errors import BadInput


def snapshot(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run; not needed if only one is running.")] = "",
    directory: Annotated[Path | None, options.output_option("DIR", "Output directory; else snapshot-RUN.")] = None,
    as_json: options.Json = False,
) -> None:
    """Copy what running ranks have recorded so far; they run on. For a hung job it shows who waits for whom."""
    from tracekern.segment.salvage import find_leftovers
    from tracekern.segment.snapshot import snapshot_run

    found = find_leftovers(run_id)
    running = sorted({leftover.run_id for leftover in found if leftover.is_running})
    if run_id in running:
        running = [run_id]
    if len(running) > 1:
        raise BadInput(f"several captures are open: {', '.join(running)}; name one")
    if not running:
        dead = {leftover.run_id: leftover.directory for leftover in found}
        left = [
            f"dead ranks of run {name}, into {place}, left records: `{suggest('salvage', name)}` saves them"
            for name, place in dead.items()
        ]
        which = f"run {run_id}: " if run_id else ""
        advice = left or [
            "snapshot reads programs that are inside tracekern.capture(...), of this user, on their machine"
        ]
        raise BadInput("; ".join([f"{which}no capture is open on this machine", *advice]))
    members = next(leftover.ranks for leftover in found if leftover.run_id == running[0])
    directory = directory or Path(f"snapshot-{running[0]}")
    with working("copying what was recorded"):
        ranks = snapshot_run(running[0], directory)
    if as_json:
        print_json({"run_id": running[0], "ranks": ranks, "capture": str(directory)})
        return
    what = f"what {words.ranks(ranks)} of {len(members)} recorded so far"
    console().print(f"run {running[0]}: {what} -> {directory}")
    note_only_counted([directory])
    partial = [] if len(ranks) == len(members) else ["--partial"]
    note(f"who waits for whom: {suggest('report', directory, *partial)}")
