"""Brings the ranks of torch.distributed together before they make a process group.

A rank that calls new_group() alone, because only it opens a capture, has counted one group more than the others, and
the program's own next group fails on all of them. So the ranks meet in the store first, where one word decides.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

from tracekern.errors import BadInput, PeerLost
from tracekern.formatting import ranks as name_ranks

_num_meetings = Counter[str]()
_GO, _STOP = "go", "stop"


def id_of(ranks: Sequence[int]) -> str:
    """Returns a short text that is equal for the same ranks of the world, of which there may be thousands."""
    return f"{zlib.crc32(' '.join(map(str, ranks)).encode()):08x}"


def meet(rank: int, ranks: Sequence[int], timeout_s: float, problem: str = "") -> None:
    """Returns when all of these ranks of the world have called it as often. rank: this one.

    On all ranks alike, raises PeerLost if one does not come in time, and BadInput with the `problem` that one has.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store, limit = _get_default_store(), timedelta(seconds=timeout_s)
    who = id_of(ranks)
    place = f"tracekern-meeting-{who}-{_num_meetings[who]}/"
    _num_meetings[who] += 1
    decision = f"{place}decision"
    store.set(f"{place}{rank}", "")
    if problem and store.add(f"{place}deciders", 1) == 1:
        store.set(decision, f"rank {rank} {problem}")
    is_last = store.add(f"{place}arrived", 1) == len(ranks)
    if not is_last:
        with contextlib.suppress(RuntimeError):  # somebody is late
            store.wait([decision], limit)
    # The first who adds decides, also for those that come later.
    if (is_last or not store.check([decision])) and store.add(f"{place}deciders", 1) == 1:
        store.set(decision, _GO if is_last else _STOP)
    store.wait([decision], limit)
    word = store.get(decision).decode()
    if word not in (_GO, _STOP):
        raise BadInput(word)
    if word == _STOP:
        late = [peer for peer in ranks if not store.check([f"{place}{peer}"])]
        who = f"{name_ranks(late)} did not come" if late else "one came too late"
        raise PeerLost(f"rank {rank}: not all ranks open what this one opens: {who} within {timeout_s:g} s")
