"""What does tracekern do when it is killed, starved, fed with damage or met by strangers?

    python benchmarks/reliability.py
    python benchmarks/reliability.py --cases 200 --kills 6 --only kills      # a quick look

Damage: captures behind right checksums, mutated in every section, read as a user reads them. Kills: a run of four
ranks, in which a rank, the process that starts the ranks, or the launcher gets one of the standard signals at a random
time between its start and the end of the run. Each of the three gets SIGKILL, SIGTERM, SIGINT, SIGHUP and SIGSEGV
before the others; a stopped launcher is continued after two seconds, as with Ctrl-Z.
Limits: the same run with few open files, little memory, a full disk or full shared memory. Strangers: the tests with
another user, which need root. Each run has a time limit and a limit of lines; none may print a traceback, leave a
process, a half-written file or a scratch directory, or leave something in /dev/shm that the next run does not name and
`tracekern salvage` does not remove. Exits with 1 if one does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness import ROOT, Table, write_results

from tracekern.dump.reader import is_whole
from tracekern.files import scratch_directory
from tracekern.record.session import CLOSE_TIMEOUT_S

PROGRAM = [sys.executable, "-m", "tracekern"]
SHAPE = ["--ranks", "4", "--tokens", "8", "--hidden", "64", "--experts", "16", "--topk", "2"]
LIMIT_S = 5
MAX_S = LIMIT_S + CLOSE_TIMEOUT_S + 60.0
"""The longest phase, the time that others have to follow a failed rank, and both graces of signals."""
MAX_LINES = 6
SIGNALS = sorted(set(range(1, 32)) - {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
"""All standard signals but four, which a process ignores by default."""
FIRST = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV)
"""What ends most programs: each target gets these first."""
STOPS = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
TARGETS = ("rank", "spawner", "launcher")
STRANGERS = ("strangers", "working_directory", "open_strangers", "symmetric_heap", "files")
"""Tests with another user of the machine, or with what one could plant."""
SECTIONS = ("damage", "kills", "limits", "strangers")


@dataclass
class Outcome:
    """What one run did."""

    case: str
    status: int = 0
    seconds: float = 0.0
    text: str = ""
    faults: list[str] = field(default_factory=list)
    left: int = 0
    """Segments that it left, named by the next run and removed by `salvage`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000, help="damaged captures")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SECTIONS, help="without writing the results")
    options = parser.parse_args()
    for number in SIGNALS:  # a background job of a shell, or one under nohup, ignores some, and so would the runs
        if signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    wanted = [options.only] if options.only else SECTIONS
    found = {}
    if "damage" in wanted:
        found["damage"] = damage(options.cases, options.seed)
    if "kills" in wanted:
        found["kills"] = kills(options.kills, random.Random(options.seed))
    if "limits" in wanted:
        found["limits"] = limits()
    if "strangers" in wanted:
        found["strangers"] = strangers()
    num_faults = sum(section["faults"] for section in found.values())
    if not options.only:
        write_results("reliability", {"limit_s": MAX_S, "most_lines": MAX_LINES, "seed": options.seed, **found})
    sys.exit(1 if num_faults else 0)


# Damage


def damage(num_cases: int, seed: int) -> dict:
    script = [sys.executable, str(ROOT / "tests" / "damaged_cases.py"), "--seed", str(seed), "--count", str(num_cases)]
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    *told, last = done.stdout.splitlines() or [done.stderr]
    counted = json.loads(last)
    outcomes = counted["all"]
    table = Table(f"{num_cases} damaged captures, checksums right", ["read", "refused", "tracebacks", "peak MiB"])
    num_faults = outcomes.get("fault", 0)
    table.add(*(str(number) for number in (outcomes["read"], outcomes["refused"], num_faults, counted["peak_mib"])))
    table.print()
    print("\n".join(told))
    return {"cases": num_cases, "faults": num_faults, **outcomes, "peak_mib": counted["peak_mib"]}


# Kills


def kills(num_kills: int, randomly: random.Random) -> dict:
    for _ in range(2):  # the first one warms the caches
        with scratch_directory() as scratch:
            whole = run_attacked("whole run", scratch / "whole", lambda process: None)
    print(f"a run takes {whole.seconds:.1f} s")
    outcomes: list[Outcome] = []
    signals = {target: draw_signals(randomly) for target in TARGETS}
    for idx in range(num_kills):
        target = TARGETS[idx % len(TARGETS)]
        number = next(signals[target])
        delay_s = randomly.uniform(0, whole.seconds)
        case = f"{target} {signal.Signals(number).name} after {delay_s:.2f} s"

        def attack(
            process: subprocess.Popen[str], target: str = target, number: int = number, at: float = delay_s
        ) -> None:
            hit(process, target, number, at, randomly)

        with scratch_directory() as scratch:
            outcomes.append(run_attacked(case, scratch / "capture", attack))
        tell(outcomes[-1], f"{idx + 1}/{num_kills}")
    rows = {target: [one for one in outcomes if one.case.startswith(target)] for target in TARGETS}
    print_outcomes(f"{num_kills} signals to runs of four ranks", rows)
    return summary(outcomes, rows)


def draw_signals(randomly: random.Random) -> Iterator[int]:
    """Yields the signals for one target, without an end: those of FIRST, then the others in random order."""
    others = [number for number in SIGNALS if number not in FIRST]
    while True:
        yield from FIRST
        yield from randomly.sample(others, len(others))


def hit(launcher: subprocess.Popen[str], target: str, number: int, delay_s: float, randomly: random.Random) -> None:
    """Sends the signal `delay_s` after the launcher's start, or as soon as the target is there."""
    began, pid = time.monotonic(), 0
    while launcher.poll() is None:
        pid = find_target(launcher.pid, target, randomly)
        if pid and time.monotonic() >= began + delay_s:
            break
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        if pid and launcher.poll() is None:
            os.kill(pid, number)
    if target == "launcher" and number in STOPS:
        time.sleep(2)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def find_target(launcher: int, target: str, randomly: random.Random) -> int:
    """Returns the process to hit, 0 if it is not there."""
    if target == "launcher":
        return launcher
    spawners = children(launcher)
    if target == "spawner" or not spawners:
        return spawners[0] if spawners else 0
    ranks = children(spawners[0])
    return randomly.choice(ranks) if ranks else 0


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


# Limits


def limits() -> dict:
    gigabyte = 1 << 30
    cases: list[tuple[str, Callable[[], None] | None, str]] = [
        *((f"{files} open files", limited(resource.RLIMIT_NOFILE, files), "") for files in (16, 24, 40, 63)),
        *(
            (f"{part:g} GiB of addresses", limited(resource.RLIMIT_AS, int(part * gigabyte)), "")
            for part in (0.3, 1, 2)
        ),
        *((f"files of {size} KiB", limited(resource.RLIMIT_FSIZE, size << 10), "") for size in (1, 64)),
        ("1 s of CPU time", limited(resource.RLIMIT_CPU, 1), ""),
        *(
            (f"{size} of /dev/shm", None, f"mount -t tmpfs -o size={size} tmpfs /dev/shm")
            for size in ("64k", "1m", "8m")
        ),
        *((f"{size} of disk", None, f"mount -t tmpfs -o size={size} tmpfs OUTPUT") for size in ("4k", "64k")),
    ]
    outcomes = []
    for case, prepare, mount in cases:
        with scratch_directory() as scratch:
            if mount and os.geteuid() != 0:
                print(f"{case}: left out, only root can mount")
                continue
            directory = scratch / "capture"
            directory.mkdir()
            outcomes.append(run_attacked(case, directory, lambda process: None, prepare, mount))
        tell(outcomes[-1], "")
    rows = {one.case: [one] for one in outcomes}
    print_outcomes("runs of four ranks that lack something", rows)
    return summary(outcomes, rows)


def limited(what: int, limit: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (limit, limit))


# Strangers


def strangers() -> dict:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in STRANGERS]
    done = subprocess.run([*words, *files], capture_output=True, text=True, cwd=ROOT)
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    table = Table("tests with another user of the machine", ["passed", "failed", "skipped", "as"])
    as_user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    table.add(*(str(counts.get(what, 0)) for what in ("passed", "failed", "skipped")), as_user)
    table.print()
    num_faults = counts.get("failed", 0) + counts.get("error", 0) + (done.returncode not in (0, 1))
    if num_faults:
        print(done.stdout[-4000:])
    return {"as": as_user, "faults": num_faults, **counts}


# A run under attack


def run_attacked(
    case: str,
    directory: Path,
    attack: Callable[[subprocess.Popen[str]], None],
    prepare: Callable[[], None] | None = None,
    mount: str = "",
) -> Outcome:
    """Runs four ranks, attacks them and looks at what they did and left."""
    mark = f"TRACEKERN_ATTACKED={os.getpid()}-{time.monotonic_ns()}"
    temporary = directory.parent / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary), **dict([mark.split("=")])}
    words = [*PROGRAM, "run", "moe", *SHAPE, "--iterations", "50", "--limit-s", str(LIMIT_S), "-o", str(directory)]
    if mount:
        words = ["unshare", "-m", "sh", "-c", f'{mount.replace("OUTPUT", str(directory))} && exec "$@"', "-", *words]
    before = set(segments())
    began = time.monotonic()
    outcome = Outcome(case)
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=prepare
    ) as process:
        attack(process)
        try:
            outcome.text = process.communicate(timeout=max(0.1, began + MAX_S - time.monotonic()))[1]
        except subprocess.TimeoutExpired:
            outcome.faults.append(f"not over after {MAX_S:.0f} s")
            end_all(mark)
            outcome.text = process.communicate()[1]
    outcome.seconds, outcome.status = time.monotonic() - began, process.returncode
    judge(outcome, directory, temporary, mark, sorted(set(segments()) - before))
    return outcome


def judge(outcome: Outcome, directory: Path, temporary: Path, mark: str, left: list[str]) -> None:
    """Notes what must not be, and removes it."""
    if "Traceback" in outcome.text or '  File "' in outcome.text:
        outcome.faults.append("traceback")
    if (lines := len(outcome.text.splitlines())) > MAX_LINES:
        outcome.faults.append(f"{lines} lines")
    if outcome.status > 0 and not outcome.text.splitlines()[-1:]:
        outcome.faults.append("no word")
    deadline = time.monotonic() + 10
    while running(mark) and time.monotonic() < deadline:  # those of a killed launcher are being killed
        time.sleep(0.05)
    if end_all(mark):
        outcome.faults.append("processes left")
    if any(not is_whole(path) for path in directory.glob("rank_*.tkdump")):
        outcome.faults.append("half-written dump")
    if any(temporary.iterdir()):
        outcome.faults.append(f"scratch left: {', '.join(path.name for path in temporary.iterdir())}")
    if left:
        clean_up(outcome, directory, left)


def clean_up(outcome: Outcome, directory: Path, left: list[str]) -> None:
    """Notes segments that the next run does not name, or `salvage` does not remove."""
    outcome.left = len(left)
    words = ["run", "moe", *SHAPE, "--iterations", "1", "--no-trace"]
    told = subprocess.run([*PROGRAM, *words], capture_output=True, text=True).stderr
    for run_id in sorted({name.removeprefix("tracekern-").rpartition("-")[0] for name in left}):
        if f"salvage {run_id}" not in told:
            outcome.faults.append(f"{run_id} left and not named")
        done = subprocess.run([*PROGRAM, "salvage", run_id], capture_output=True, text=True)
        if done.returncode or "Traceback" in done.stderr:
            outcome.faults.append(f"salvage: {done.stderr[-300:]}")
    for name in sorted(set(left) & set(segments())):
        outcome.faults.append(f"{name} left in /dev/shm")
        (Path("/dev/shm") / name).unlink()
    if any(path.suffix == ".tmp" for path in directory.glob(".*")):
        outcome.faults.append("temporary files left")


def segments() -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir()]


def running(mark: str) -> list[int]:
    """Returns the processes with the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def end_all(mark: str) -> bool:
    """Kills the processes with the mark. Returns whether there were any."""
    found = running(mark)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


# Tables


def tell(outcome: Outcome, number: str) -> None:
    last = (outcome.text.splitlines() or [""])[-1]
    faults = f"  FAULT: {'; '.join(outcome.faults)}" if outcome.faults else ""
    print(
        f"{number:>6} {outcome.case}: {outcome.status} after {outcome.seconds:.1f} s  {last[:110]}{faults}", flush=True
    )
    if outcome.faults:
        print(outcome.text[-3000:])


def print_outcomes(title: str, rows: dict[str, list[Outcome]]) -> None:
    table = Table(title, ["", "runs", "status", "longest", "most lines", "left and named", "faults"])
    for name, outcomes in rows.items():
        row = summary_of(outcomes)
        status = ", ".join(map(str, row["status"]))
        table.add(
            name,
            str(row["runs"]),
            status,
            f"{row['longest_s']:.1f} s",
            *(str(row[key]) for key in ("lines", "left", "faults")),
        )
    table.print()


def summary(outcomes: list[Outcome], rows: dict[str, list[Outcome]]) -> dict:
    return {
        "faults": sum(bool(one.faults) for one in outcomes),
        "rows": {name: summary_of(of_row) for name, of_row in rows.items()},
        "runs": [{**asdict(one), "text": one.text if one.faults else ""} for one in outcomes],
    }


def summary_of(outcomes: list[Outcome]) -> dict:
    return {
        "runs": len(outcomes),
        "status": sorted({one.status for one in outcomes}),
        "longest_s": round(max((one.seconds for one in outcomes), default=0.0), 1),
        "lines": max((len(one.text.splitlines()) for one in outcomes), default=0),
        "left": sum(one.left > 0 for one in outcomes),
        "faults": sum(bool(one.faults) for one in outcomes),
    }


if __name__ == "__main__":
    main()
