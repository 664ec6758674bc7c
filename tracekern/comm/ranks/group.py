"""The thin control plane of a capture: who the ranks are, and small messages between them.

Ranks come from torch.distributed if the process uses it, else from what the launcher set, else there is one. Messages
go over a separate gloo group with its own time limit: a dead peer must not keep the survivors from their dumps.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.comm.devices.host_memory import lacking_files
from tracekern.comm.devices.this_thread import this_resident
from tracekern.comm.ranks import messages
from tracekern.comm.ranks.agreement import Check, Said, refuse_different_calls
from tracekern.comm.ranks.launcher_environment import rank_and_size
from tracekern.comm.ranks.meeting import id_of, meet
from tracekern.environment import positive_number
from tracekern.errors import BadInput, PeerLost, is_of_signal, one_line
from tracekern.formatting import shown

MAX_HEAP_RANKS = 64
"""Most ranks that share a symmetric heap: kMaxRanks of csrc/comm/heap.h."""
_CHUNK_BYTES = 16 << 20
_NO_NAMES = ("undefined", "default_pg")
"""What torch calls a group that the program gave no name."""
_num_made = Counter[str]()
"""How many process groups this process has made of some of the ranks."""


def message_timeout_s() -> float:
    """Returns how long a rank waits for the messages of the others. Raises BadInput where the variable is no number.

    The launcher, which can tell why one is late, sets more than it waits itself.
    """
    return positive_number("TRACEKERN_GROUP_TIMEOUT_S", 60.0)


def ranks_in(group: Any) -> list[int]:
    """Returns the world's ranks, in order, of a torch ProcessGroup, a Group or a list of them. Not collective.

    Raises BadInput where it is none of these, or this rank is not among them.
    """
    if isinstance(group, Group):
        return list(group.world_ranks)
    if isinstance(group, list | tuple) and (resident := this_resident()) is not None:
        residents, rank = resident
        return members_of_run(group, rank, residents.num_ranks)
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        if not isinstance(group, list | tuple):
            raise _no_group(group)
        raise BadInput(f"group {shown(group)}: ranks are some of torch.distributed's, which is not initialised here")
    own, num_ranks, ranks = dist.get_rank(), dist.get_world_size(), group
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise BadInput(f"rank {own} is not in the group that it gives; only the group's ranks may give it")
    if isinstance(group, dist.ProcessGroup):
        try:
            ranks = dist.get_process_group_ranks(group)
        except (KeyError, ValueError):
            raise BadInput(f"rank {own}: the program has destroyed the process group that it gives") from None
    elif not isinstance(group, list | tuple):
        raise _no_group(group)
    return members_of_run(ranks, own, num_ranks)


def members_of_run(ranks: Sequence[Any], own: int, num_ranks: int) -> list[int]:
    """Returns the ranks in their order. Raises BadInput for what are no ranks of the run, each once, with this one."""
    found = sorted({rank for rank in ranks if type(rank) is int and 0 <= rank < num_ranks})
    if len(found) < len(ranks) or own not in found:
        wanted = f"some of 0 to {num_ranks - 1}, each once, rank {own} among them"
        raise BadInput(f"group {shown(ranks)}: wanted ranks of the run, {wanted}")
    return found


def _new_process_group(ranks: list[int], own: int) -> Any:
    """Returns a gloo group that only these ranks make. own: this rank's place among them.

    torch's new_group() would name it by how many groups this rank is in. Ranks that are in another one, too, would
    look for another name; and where a group is gone, the next one would find its addresses in the store.
    """
    from torch.distributed import distributed_c10d as c10d

    who = id_of(ranks)
    name: Any = f"tracekern-group-{who}-{_num_made[who]}"
    _num_made[who] += 1
    timeout, store = timedelta(seconds=message_timeout_s()), c10d._get_default_store()
    made: Any = c10d._new_process_group_helper(
        len(ranks), own, ranks, c10d.Backend("gloo"), store, group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[made[0]] = {rank: place for place, rank in enumerate(ranks)}
    return made[0]


class Group:
    """The ranks of a run: `rank`, `num_ranks`, and messages between them where `is_connected`."""

    def __init__(self, rank: int, num_ranks: int, process_group: Any = None) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_residents = 1
        """Ranks that are threads of this process and share its GPU side by side: all, or only this one."""
        self.process_group = process_group
        """The gloo group; None for a single rank, or ranks known from the environment alone."""
        self.num_world_ranks = num_ranks
        """How many ranks the run has, of which these may be some."""
        self.name = ""
        """What the program calls these ranks, where they are a group of its own."""
        self._global_ranks: list[int] | None = None
        """What torch.distributed calls the ranks, where these are some of its ranks alone."""

    @classmethod
    def discover(cls) -> Group:
        """Finds the ranks of this process's run: those that are resident in it, else from torch.distributed where it is
        initialized, else from RANK and WORLD_SIZE or what mpirun and srun set. All ranks call it together.

        Raises:
            BadInput: What the launcher set does not fit together, or a rank may open too few files.
            PeerLost: A peer has ended or is late.
        """
        if (own := this_resident()) is not None:
            residents, rank = own
            group: Group = residents.open_group(rank)
            return group
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return cls._alone(*rank_and_size())
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        if num_ranks == 1:
            return cls._alone(rank, num_ranks)
        timeout_s = message_timeout_s()
        with losing_peers(rank):
            meet(rank, range(num_ranks), timeout_s, lacking_files(num_ranks))
            process_group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")
        return cls(rank, num_ranks, process_group)

    @classmethod
    def _alone(cls, rank: int, num_ranks: int) -> Group:
        if problem := lacking_files(1):
            raise BadInput(f"rank {rank} {problem}")
        return cls(rank, num_ranks)

    @classmethod
    def of(cls, group: Any, name: str = "") -> Group:
        """Returns the Group of a torch ProcessGroup or of a list of the world's ranks, made by its ranks together, or
        `group` itself. None: discover(). Ranks are numbered in the world's order.

        name: what the program calls these ranks; "" for what torch.distributed does.

        Raises:
            BadInput: It is none of these.
            PeerLost: A peer has ended or is late.
        """
        if group is None or isinstance(group, Group):
            return group or cls.discover()
        ranks = ranks_in(group)
        if (resident := this_resident()) is not None:
            residents, rank = resident
            of_residents: Group = residents.open_group(rank, ranks)
            of_residents.name = name
            return of_residents
        dist = sys.modules["torch.distributed"]
        if len(ranks) == dist.get_world_size():
            return cls.discover()
        own = cls(ranks.index(dist.get_rank()), len(ranks))
        own._global_ranks, own.num_world_ranks = ranks, dist.get_world_size()
        told = getattr(group, "group_desc", "")
        own.name = name or ("" if told in _NO_NAMES else told)
        if own.num_ranks > 1:
            with losing_peers(own.world_rank):
                own.process_group = _new_process_group(ranks, own.rank)
        return own

    @classmethod
    def another(cls, group: Any) -> Group:
        """Returns of() with messages of its own, which the caller closes, also for a Group. Collective."""
        if isinstance(group, Group):
            group = None if group.is_world else group.world_ranks
        return cls.of(group)

    @property
    def is_world(self) -> bool:
        """Whether these are all ranks of the run."""
        return self._global_ranks is None

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """What the run calls the ranks."""
        return tuple(map(self._place, range(self.num_ranks)))

    @property
    def world_rank(self) -> int:
        """What the run calls this rank."""
        return self.rank if self._global_ranks is None else self._global_ranks[self.rank]

    @property
    def is_connected(self) -> bool:
        """Whether the ranks can exchange messages."""
        return self.num_ranks == 1 or self.process_group is not None

    def all_gather(self, value: Any, what: str = "a gather") -> list[Any]:
        """Returns the values of all ranks, [num_ranks]. Called by all ranks together.

        Args:
            value: What JSON holds, bytes or an array of numbers, in lists and dicts. A tuple comes back as a list.
            what: What the values are gathered for, the same on all ranks.

        Raises:
            BadInput: Ranks gather for different things.
            PeerLost: A peer has ended or is late.
        """
        heard = self._exchange(messages.encode([what, value]))
        refuse_different_calls([name for name, _ in heard], self.world_ranks)
        return [their_value for _, their_value in heard]

    def _exchange(self, message: bytes) -> list[tuple[str, Any]]:
        """Returns what each rank gathers for, and its value, [num_ranks]."""
        if self.process_group is None:
            return [name_and_value(message)]
        import torch
        import torch.distributed as dist

        with losing_peers(self.world_rank):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_ranks)]
            dist.all_gather(sizes, torch.tensor([len(message)]), group=self.process_group)
            padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            received = [torch.empty_like(padded) for _ in range(self.num_ranks)]
            dist.all_gather(received, padded, group=self.process_group)
            parts = [theirs.numpy()[:size].tobytes() for theirs, size in zip(received, sizes, strict=True)]
            return [name_and_value(part) for part in parts]

    def barrier(self, timeout_s: float | None = None) -> None:
        """Waits until all ranks have called it.

        Raises:
            PeerLost: A peer has ended, or is later than `timeout_s`, by default message_timeout_s().
        """
        if self.process_group is not None:
            with losing_peers(self.world_rank):
                self._come_and_go(time.monotonic() + (timeout_s or message_timeout_s()))

    def _come_and_go(self, deadline: float) -> None:
        """Tells rank 0 that this rank is here, and waits for its answer; rank 0 answers when all are here.

        torch's monitored_barrier() does so too, but its limit holds on rank 0 alone.
        """
        import torch
        import torch.distributed as dist

        peers = [0] if self.rank else range(1, self.num_ranks)
        words = {peer: torch.zeros(1, dtype=torch.uint8) for peer in peers}
        for call in (dist.isend, dist.irecv) if self.rank else (dist.irecv, dist.isend):
            for work in [call(word, self._place(peer), group=self.process_group) for peer, word in words.items()]:
                if work is not None:  # never here: all ranks are in the group
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    def _place(self, rank: int) -> int:
        """Returns what torch.distributed calls a rank."""
        return rank if self._global_ranks is None else self._global_ranks[rank]

    def launch(self, stream: int, num_kernels: int, run: Callable[[int, int], None], timeout_s: float) -> None:
        """Launches kernels that wait for those of the other ranks.

        Args:
            stream: Handle of the stream that they are launched on.
            num_kernels: How many there are.
            run: Launches the kernels from its first argument up to its second.
            timeout_s: How long the kernels wait for a rank. Ranks that share a GPU may wait for it before they launch.
        """
        run(0, num_kernels)

    def align_launches(self) -> None:
        """Called by all ranks together, after some have launched kernels that others have not."""

    def close(self) -> None:
        """Closes the threads and sockets of the group."""
        if self.process_group is not None and not self.forget_if_gone():
            import torch.distributed as dist

            dist.destroy_process_group(self.process_group)
            self.process_group = None

    def forget_if_gone(self) -> bool:
        """Lets go of the process group if the program has destroyed it, with all others. Returns whether it has."""
        if self.process_group is None:
            return False
        import torch.distributed as dist

        try:
            dist.get_process_group_ranks(self.process_group)
        except (KeyError, ValueError):
            self.process_group = None
        return self.process_group is None

    def agree(self, what: str, check: Check) -> dict[str, Any]:
        """Returns the settings that check() returns, the same on all ranks. Collective.

        If check() raises BadInput on a rank, or the settings differ, all ranks raise the same BadInput. what: the call
        that the check is of.
        """
        said = Said(check)
        said.settle(self.all_gather(said.message(), what), self.world_ranks)
        return said.settings

    def refuse_together(self, problem: str) -> None:
        """Raises BadInput on all ranks with the first rank's problem; "" means none. Collective."""
        first = next((text for text in self.all_gather(problem, "a check of all ranks") if text), "")
        if first:
            raise BadInput(first)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Wraps work that each rank does by itself. Collective; returns when all ranks have finished.

        If the work fails on a rank, all others raise BadInput with that rank's error.
        """
        try:
            yield
        except Exception as error:
            with contextlib.suppress(PeerLost):
                self.all_gather(f"rank {self.world_rank}: {one_line(error)}", "a check of all ranks")
            raise
        self.refuse_together("")

    def send_bytes(self, data: memoryview, receiver: int) -> None:
        """Sends to a rank that calls receive_bytes(). Raises PeerLost if it is gone."""
        import torch
        import torch.distributed as dist

        with losing_peers(self.world_rank):
            dist.send(torch.tensor([len(data)]).view(torch.uint8), self._place(receiver), group=self.process_group)
            for first in range(0, len(data), _CHUNK_BYTES):
                chunk = np.frombuffer(data[first : first + _CHUNK_BYTES], np.uint8).copy()
                dist.send(torch.from_numpy(chunk), self._place(receiver), group=self.process_group)

    def receive_bytes(self, sender: int) -> Iterator[memoryview]:
        """Yields what a rank sends, in chunks. Raises PeerLost if it is gone."""
        left = int(self._receive(sender, 8).view(np.int64)[0])
        while left:
            chunk = self._receive(sender, min(left, _CHUNK_BYTES))
            left -= len(chunk)
            yield chunk.data

    def _receive(self, sender: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        import torch
        import torch.distributed as dist

        received = np.empty(num_bytes, np.uint8)
        with losing_peers(self.world_rank):
            dist.recv(torch.from_numpy(received), self._place(sender), group=self.process_group)
        return received


def require_group(group: Any) -> None:
    """Raises BadInput for what is no Group."""
    if not isinstance(group, Group):
        raise _no_group(group)


def _no_group(group: Any) -> BadInput:
    return BadInput(f"group is {type(group).__name__}; wanted tracekern.Group.discover()")


def name_and_value(message: bytes) -> tuple[str, Any]:
    """Decodes a message of all_gather()."""
    name, value = messages.decode(message)
    return str(name), value


@contextlib.contextmanager
def losing_peers(rank: int) -> Iterator[None]:
    """Wraps calls of torch.distributed: raises PeerLost, of one line, for whatever they raise.

    Mostly that is RuntimeError. But others of this machine can connect to the store and to gloo, and what these make of
    nonsense may be any exception.
    """
    try:
        yield
    except (BadInput, PeerLost):
        raise
    except Exception as error:  # of any kind, see above
        if is_of_signal(error):
            raise
        # Without the place in gloo's sources and without its advice.
        why = re.sub(r"^\[[^]]*\] ", "", str(error).strip().partition("\n")[0]).partition(". ")[0][:200]
        why = why or type(error).__name__
        raise PeerLost(f"rank {rank}: the other ranks do not answer ({why}); one has ended or is late") from None
