"""The workflow in examples/ci: it is YAML that GitHub would take, and its commands do what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / "examples" / "ci" / "tracekern.yml"
LAUNCHED = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'tests' / 'launched.py'))}"


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    import yaml

    return yaml.safe_load(WORKFLOW.read_text())


@pytest.fixture
def runner(tmp_path) -> Path:
    """A working directory as the checkout and install steps leave it, with `tracekern` on the path."""
    shim = tmp_path / "bin" / "tracekern"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tracekern "$@"\n')
    shim.chmod(0o755)
    for side in ("base", "head"):
        activate = tmp_path / side / ".venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text("")
    return tmp_path


def run_steps(job: dict[str, Any], directory: Path, program: str) -> tuple[list[int], str]:
    """Exit codes and output of the job's commands, as the runner's bash would run them; installing is left out."""
    environment = {
        **os.environ,
        "PATH": f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PROGRAM": program,
        "GITHUB_STEP_SUMMARY": str(directory / "summary.md"),
    }
    codes, output = [], ""
    for step in job["steps"]:
        if "run" in step and step["name"] != "Install" and (not any(codes) or step.get("if") == "always()"):
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            result = subprocess.run(
                command, cwd=directory, env=environment, capture_output=True, text=True, timeout=280
            )
            codes.append(result.returncode)
            output += result.stdout + result.stderr
    return codes, output


def test_it_is_a_workflow(workflow):
    assert set(workflow[True]) == {"pull_request", "schedule"}  # YAML 1.1 reads `on` as true
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert "run" not in step or step["name"]
            assert "uses" not in step or re.fullmatch(r"actions/[a-z/-]+@v\d+", step["uses"])
    assert "$TRACEKERN_OUT" in workflow["env"]["PROGRAM"]


def test_a_pull_request_that_makes_it_slower(workflow, runner):
    # The two checkouts hold different programs: the head's waits are longer.
    (runner / "base" / "options").write_text("")
    (runner / "head" / "options").write_text("--slow-wait 1.5")
    program = f'{LAUNCHED} "$TRACEKERN_OUT" $(cat options)'
    codes, output = run_steps(workflow["jobs"]["pull-request"], runner, program)
    assert codes == [1, 0], output
    assert "dispatch.wait_token.p50 regressed" in (runner / "summary.md").read_text()
    assert (runner / "tracekern.xml").read_text().count("<failure") >= 1
    assert len(list((runner / "captures").iterdir())) == 2 * (8 + 1), "the warm-ups are kept too"


def test_two_nights(workflow, runner):
    program = f'{LAUNCHED} "$TRACEKERN_OUT"'
    for night in (1, 2):
        codes, output = run_steps(workflow["jobs"]["nightly"], runner, program)
        assert codes == [0, 0, 0], output
        assert len(list((runner / ".tracekern" / "cpu").iterdir())) == night
        assert len((runner / "history.jsonl").read_text().splitlines()) == night
    assert (runner / "trend.html").stat().st_size > 10_000


def test_a_night_that_regressed_is_kept_too(workflow):
    """What the history says comes back the next night whatever the check said."""
    steps = workflow["jobs"]["nightly"]["steps"]
    restored, saved = (
        next(step for step in steps if step.get("uses", "").startswith(f"actions/cache/{what}@"))
        for what in ("restore", "save")
    )
    checked = next(step for step in steps if step.get("name") == "Check")
    assert steps.index(restored) < steps.index(checked) < steps.index(saved)
    assert saved["if"] == "always()"
    assert saved["with"] == {key: restored["with"][key] for key in ("path", "key")}
    assert set(saved["with"]["path"].split()) <= {".tracekern", *checked["run"].split()}


def test_the_program_of_the_workflow_is_one(workflow, tmp_path):
    """The command in the file, with the sizes that a CPU can do in a test."""
    words = workflow["env"]["PROGRAM"].split()
    for name, value in {"--ranks": 2, "--hidden": 256, "--tokens": 8, "--experts": 8, "--iterations": 2}.items():
        words[words.index(name) + 1] = str(value)
    command = " ".join([shlex.quote(sys.executable), "-m", *words])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRACEKERN_OUT": str(tmp_path / "run")}
    subprocess.run(command, shell=True, env=environment, check=True, capture_output=True, timeout=200)
    assert len(list((tmp_path / "run").glob("rank_*.tkdump"))) == 2


def test_the_guide_names_only_options_that_exist(command_line):
    guide = (ROOT / "docs" / "gate.md").read_text()
    plugin = (ROOT / "tracekern" / "gate" / "pytest_plugin.py").read_text()
    known = "".join(command_line(name, "--help").stdout for name in ("check", "ab", "diff")) + plugin
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", guide)):
        assert option in known, option
