"""Parts of a run in files: what there is of one is in memory only while somebody works with it.

What a task made of a part is named by the task and by what it was given. Where a run that was killed is started again,
what is there already is not made anew.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tracekern.analysis.parts import Parts
from tracekern.analysis.scratch import Scratch
from tracekern.errors import BadInput

Value = TypeVar("Value")
Other = TypeVar("Other")

_TRIES = 3
"""So often a part is tried whose process was killed."""
_MAYBE = "maybe for lack of memory; give less with --memory"


class Workers:
    """Does tasks in this process, or in several others."""

    def __init__(self, num_processes: int, tell: Callable[[int, int, str], None] = lambda *_: None) -> None:
        """tell: takes how much is done of how much, and of what."""
        self.num_processes, self._tell, self._num_rounds = num_processes, tell, 0
        self._pool: ProcessPoolExecutor | None = None
        self._alive: Connection | None = None
        """Closed when the processes are to end, and by the death of this one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Workers, (1,)  # another process does what it is told to by itself

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def do(self, scratch: Scratch, todo: Sequence[tuple[bytes, str]]) -> None:
        """todo: (pickled task and what it is given, name of what it makes), see _do()."""
        self._num_rounds += 1
        if self.num_processes < 2 or len(todo) < 2:
            for number, (data, name) in enumerate(todo):
                self._tell(number, len(todo), f"windows in round {self._num_rounds}")
                _do(scratch, data, name)
            return
        for _ in range(_TRIES):
            todo = [(data, name) for data, name in todo if not scratch.has(name)]
            if self._is_done(scratch, todo):
                return
        raise BadInput(f"a process was killed {_TRIES} times over as it worked on a window, {_MAYBE}")

    def _is_done(self, scratch: Scratch, todo: Sequence[tuple[bytes, str]]) -> bool:
        """Whether no process was killed."""
        try:
            with _without_interrupts():
                pool = self._started()
                futures = [pool.submit(_do, scratch, data, name) for data, name in todo]
            for number, future in enumerate(as_completed(futures)):
                self._tell(number, len(todo), f"windows in round {self._num_rounds}")
                future.result()
        except BrokenProcessPool:
            self._close()
            return False
        return True

    def spread(self, task: Callable[[Value], Other], values: Sequence[Value]) -> Iterator[Other]:
        """Yields what a task makes of each value, in their order; both can be pickled."""
        if self.num_processes < 2:
            yield from map(task, values)
            return
        with _without_interrupts():
            made = self._started().map(task, values)
        try:
            yield from made
        except BrokenProcessPool:
            raise BadInput(f"a process was killed, {_MAYBE}") from None

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = get_context("spawn")
            ends, self._alive = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(self.num_processes, context, _begin, (ends,))
        return self._pool

    def _close(self) -> None:
        if self._pool is not None and self._alive is not None:
            self._alive.close()
            self._pool.shutdown(cancel_futures=True)
            self._pool = self._alive = None


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Puts Ctrl-C off until the block ends. Processes that it starts never see one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(ends: Connection) -> None:
    """Lets this process end, in whatever it does, with the one that gives it tasks. ends: closed at the other end."""

    def wait() -> None:
        ends.poll(None)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _do(scratch: Scratch, data: bytes, name: str) -> None:
    """data: pickled (task, [values, or names of files]). name: of what the task makes."""
    task, given = scratch.unpickled(data)
    scratch.save(name, task(*(value() if isinstance(value, _OfFile) else value for value in given)))


class _OfFile:
    """A value that is read where it is needed."""

    def __init__(self, scratch: Scratch, name: str) -> None:
        self.scratch, self.name = scratch, name

    def __call__(self) -> Any:
        return self.scratch.load(self.name)


class KeptParts(Parts[Value]):
    def __init__(self, scratch: Scratch, workers: Workers, names: Sequence[str]) -> None:
        """names: of the files."""
        self._scratch, self._workers, self._names = scratch, workers, names
        self._latest: tuple[int, Any] = (-1, None)

    @classmethod
    def make(cls, scratch: Scratch, workers: Workers, task: Callable[[int], Value], count: int) -> KeptParts[Value]:
        """Keeps what a task makes of each number."""
        return cls._made(scratch, workers, task, [[number] for number in range(count)])

    @classmethod
    def _made(
        cls, scratch: Scratch, workers: Workers, task: Callable[..., Other], given: Sequence[Sequence[Any]]
    ) -> KeptParts[Other]:
        todo = [scratch.pickled((task, values)) for values in given]
        names = [f"{scratch.key(data)}_{number:05d}" for number, data in enumerate(todo)]
        workers.do(scratch, [(data, name) for data, name in zip(todo, names, strict=True) if not scratch.has(name)])
        return KeptParts(scratch, workers, names)

    def __getitem__(self, number: Any) -> Any:
        if self._latest[0] != number:
            self._latest = number, self._scratch.load(self._names[number])
        return self._latest[1]

    def __len__(self) -> int:
        return len(self._names)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_latest": (-1, None)}

    def map(self, task: Callable[..., Other], *beside: Parts[Any]) -> Parts[Other]:
        columns = [parts.handed_out() for parts in (self, *beside)]
        return self._made(self._scratch, self._workers, task, list(zip(*columns, strict=True)))

    def each(self, task: Callable[[Any], Other], values: Iterable[Any]) -> Iterator[Other]:
        if self._workers.num_processes < 2:
            yield from map(task, values)
            return
        rest = iter(values)
        while some := [[value] for value in itertools.islice(rest, self._workers.num_processes)]:
            yield from self._made(self._scratch, self._workers, task, some)

    def handed_out(self) -> list[Any]:
        return [_OfFile(self._scratch, name) for name in self._names]

    def in_turn(self, task: Callable[[Value], Other]) -> Parts[Other]:
        names = [
            f"{self._scratch.key(task.__qualname__, name)}_{number:05d}" for number, name in enumerate(self._names)
        ]
        for number, name in enumerate(names):
            self._scratch.save(name, task(self[number]))
        return KeptParts(self._scratch, self._workers, names)

    def total(self) -> Any:
        name = f"total_{self._scratch.key(self._names)}"
        if not self._scratch.has(name):
            self._scratch.save(name, super().total())
        return self._scratch.load(name)

    def share(self, value: Other) -> Other:
        shared: Other = self._scratch.share(value)
        return shared
