"""benchmarks/gpu_all.py: how its steps are run, told and counted, with steps that need no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
from toolchains import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_all
from gpu_all import Step


def code(text: str) -> str:
    return f'-c "{text}"'


def ended(rows: list[tuple[str, str, float]]) -> dict[str, str]:
    return {name: how for name, how, _ in rows}


def test_what_fails_stops_nothing_and_every_step_is_told(capfd):
    steps = [
        Step("bad", code("print('1 failed, 3 passed'); raise SystemExit(3)"), 20),
        Step("many", code("raise SystemExit(1)"), 20, min_gpus=9),
        Step("idle", code("print('14 skipped in 4.26s')"), 20),
        Step("missed", code("print('goals: 2 of 12 missed')"), 20),
        Step("good", code("print('== 7 passed, 2 skipped in 1 s =='); print({gpus})"), 20),
    ]
    assert ended(gpu_all.run_steps(steps, 2, 60)) == {
        "bad": "exit 3: 1 failed, 3 passed",
        "many": "skipped: needs 9 GPUs, 2 are here",
        "idle": "nothing ran: 14 skipped in 4.26s",
        "missed": "ok: goals: 2 of 12 missed",
        "good": "ok: 7 passed, 2 skipped in 1 s",
    }
    assert "[good] 2\n" in capfd.readouterr().out


def test_a_step_that_hangs_ends_with_all_it_started(tmp_path):
    pid = tmp_path / "pid"
    hangs = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); "
        f"open('{pid}', 'w').write(str(child.pid)); time.sleep(100)"
    )
    rows = gpu_all.run_steps([Step("hangs", code(hangs), 2), Step("next", code("pass"), 20)], 1, 60)
    assert ended(rows) == {"hangs": "stopped after 2 s", "next": "ok"}
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid.read_text()], capture_output=True, text=True).stdout.strip()
    assert state[:1] in ("", "Z"), state  # gone, or not yet buried


def test_a_step_beside_others_took_as_long_as_it_ran():
    steps = [Step("beside", code("pass"), 20, beside=True), Step("long", code("import time; time.sleep(3)"), 20)]
    seconds = {name: seconds for name, _, seconds in gpu_all.run_steps(steps, 1, 60)}
    assert seconds["beside"] < seconds["long"]


def test_what_has_no_time_left_is_told(monkeypatch):
    monkeypatch.setattr(gpu_all, "GRACE_S", 1.0)
    steps = [Step("long", code("import time; time.sleep(100)"), 100), Step("late", code("pass"), 20)]
    assert ended(gpu_all.run_steps(steps, 1, 3)) == {
        "long": "stopped after 2 s",
        "late": "not run: nothing left of 3 s",
    }


def test_a_step_beside_others_is_through_before_the_one_that_needs_it(tmp_path):
    mark = tmp_path / "mark"
    steps = [
        Step("slow", code(f"import time; time.sleep(1); open('{mark}', 'w')"), 20, beside=True),
        Step("meanwhile", code(f"import os; raise SystemExit(os.path.exists('{mark}'))"), 20),
        Step("after", code(f"import os; raise SystemExit(not os.path.exists('{mark}'))"), 20, needs="slow"),
        Step("last", code("raise SystemExit(4)"), 20, beside=True),
    ]
    rows = gpu_all.run_steps(steps, 1, 60)
    assert list(ended(rows).items()) == [("slow", "ok"), ("meanwhile", "ok"), ("after", "ok"), ("last", "exit 4")]


def test_of_steps_left_out_the_table_repeats_an_earlier_run():
    earlier = {
        "date": "2026-11-01T10:00:00+00:00",
        "steps": [
            {"step": "moe", "ended": "ok", "seconds": 38.0},
            {"step": "tests", "ended": "exit 1: 2 failed", "seconds": 350.0, "date": "2026-10-01T10:00:00+00:00"},
            {"step": "results", "ended": "exit 1: 36 failed", "seconds": 50.0, "date": "2026-10-01T10:00:00+00:00"},
        ],
    }
    found = {row["step"]: row for row in gpu_all.beside_earlier([("results", "ok: 43 passed", 51.26)], earlier)}
    assert list(found) == [step.name for step in gpu_all.STEPS]
    assert found["moe"] == {"step": "moe", "ended": "ok", "seconds": 38.0, "date": earlier["date"]}
    assert found["tests"] == earlier["steps"][1]
    assert (found["results"]["ended"], found["results"]["seconds"]) == ("ok: 43 passed", 51.3)
    assert found["results"]["date"] > earlier["date"]
    assert found["clocks"]["ended"] == "never run"
    assert all(row["ended"] == "never run" for row in gpu_all.beside_earlier([], {}))


def test_each_step_names_a_file_that_is_there_and_a_step_before_it():
    names = [step.name for step in gpu_all.STEPS]
    assert len(set(names)) == len(names)
    for number, step in enumerate(gpu_all.STEPS):
        assert not step.needs or step.needs in names[:number]
        files = [word for word in step.arguments.split() if word.endswith(".py")]
        assert files
        assert all((ROOT / file).is_file() for file in files)


@pytest.mark.skipif(gpu_all.nvidia_smi("name") != "", reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run([sys.executable, "benchmarks/gpu_all.py"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    assert len(done.stdout.splitlines()) == 1
