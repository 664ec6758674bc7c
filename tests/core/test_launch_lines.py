"""What ranks print, on its way through the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tracekern.launcher.launch import launch_ranks


@pytest.mark.parametrize("lines", [1, 100_000])
def test_what_the_hearer_of_lines_raises_ends_the_run_and_is_raised(lines: int):
    """The pipe of a rank holds 64 KiB: where nobody reads it any more, the rank waits."""

    def refuse(rank: int, line: str) -> None:
        raise ArithmeticError(line)

    program = f"for _ in range({lines}): print('said')\nimport time; time.sleep(100)"
    with pytest.raises(ArithmeticError, match="said"):
        launch_ranks(2, [sys.executable, "-uc", program], on_line=refuse)


def test_a_process_that_a_rank_leaves_behind_keeps_nobody_waiting():
    """It holds the end of the pipe that the rank wrote to."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '100'], start_new_session=True).pid)"
    pids: list[int] = []
    (end,) = launch_ranks(1, [sys.executable, "-c", program], on_line=lambda _, line: pids.append(int(line)))
    assert (end.returncode, end.stopped) == (0, False)
    os.kill(pids[0], signal.SIGKILL)


def test_lines_are_printed_whatever_the_encoding_of_the_terminal():
    """One letter that it does not know must not keep the rank from all that comes after."""
    says = "import sys; sys.stdout.buffer.write('tr\u00e4ge \u2192\\n'.encode() * 10_000)"
    launch = f"launch_ranks(1, [sys.executable, '-c', {says!r}])"
    runs = f"import sys; from tracekern.launcher.launch import launch_ranks; {launch}"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", runs], env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[rank 0] tr?ge ?\n" * 10_000
