"""What ranks share, told for each thing by itself. Names of hosts tell nothing, as containers have any.

Ranks that see the same /dev/shm read each other's segments; those of one kernel and network namespace hand each other
memory; those of one machine read one wall clock; and those that write to one directory need not send their dumps.
"""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from tracekern.files import mark_file
from tracekern.host_clock import machine_id
from tracekern.segment.names import SHM_DIR, open_segment

if TYPE_CHECKING:
    from tracekern.comm.ranks.group import Group


def descriptor_reach() -> str:
    """Returns a text that is equal for processes that can hand each other file descriptors over abstract sockets."""
    network = Path("/proc/self/ns/net")
    return f"{machine_id() or platform.node()} {network.stat().st_ino if network.exists() else ''}"


def directory_id(directory: Path) -> str:
    """Returns a text that is equal for processes whose files in `directory`, which may be missing, are the same."""
    wanted = Path(os.path.realpath(directory))
    there = next(place for place in (wanted, *wanted.parents) if os.path.exists(place))
    found = there.stat()
    return f"{machine_id() or platform.node()} {found.st_dev}:{found.st_ino} {wanted.relative_to(there)}"


def share_segments(group: Group) -> bool:
    """Returns whether all ranks see one /dev/shm, by a file that rank 0 makes there. Collective."""
    if group.num_ranks == 1:
        return True
    what = "a look at /dev/shm"
    with contextlib.ExitStack() as undo:
        name = ""
        if group.rank == 0:
            with contextlib.suppress(OSError):  # its segment cannot be made there, either, which tells more
                name = undo.enter_context(mark_file(SHM_DIR))
        return all(group.all_gather(sees(str(group.all_gather(name, what)[0])), what))


def sees(name: str) -> bool:
    """Returns whether /dev/shm has a file of that name that only this user could make."""
    if not name or "/" in name:
        return False
    try:
        os.close(open_segment(name))
    except OSError:
        return False
    return True
