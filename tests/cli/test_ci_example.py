"""The workflow in examples/ci: it is YAML that GitHub would take, and its commands do what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

WORKFLOW = ROOT / "examples" / "ci" / "tracekern.yml"
LAUNCHED = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'tests' / 'launched.py'))}"


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    import yaml

    return yaml.safe_load(WORKFLOW.read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the name that the workflow installs. Its command is that of this checkout."""
    about, place = "tracekern-0.1.0.dist-info", tmp_path_factory.mktemp("wheel") / "tracekern-0.1.0-py3-none-any.whl"
    files = {
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tracekern\nVersion: 0.1.0\nProvides-Extra: read\n"
        "Provides-Extra: run\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tracekern-0.1.0.data/scripts/tracekern": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tracekern "$@"\n',
    }
    with zipfile.ZipFile(place, "w") as packed:
        for name, text in {**files, f"{about}/RECORD": "".join(f"{name},,\n" for name in files)}.items():
            packed.writestr(name, text)
    return place


def run_steps(job: dict[str, Any], directory: Path, wheel: Path, program: str) -> tuple[list[int], str]:
    """Exit codes and output of the job's commands, as the runner's bash would run them."""
    paths = directory / "paths"
    paths.touch()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
        "TRACEKERN": f"tracekern[run,read] @ {wheel.as_uri()}",
        "BUILD": 'test -n "$VIRTUAL_ENV" && pwd >> "$BUILT"',
        "BUILT": str(directory / "built"),
        "PROGRAM": program,
        "GITHUB_PATH": str(paths),
        "GITHUB_STEP_SUMMARY": str(directory / "summary.md"),
    }
    codes, output = [], ""
    for step in job["steps"]:
        if step.get("name") == "Install" and paths.read_text():
            continue  # an earlier run of the job did
        if "run" in step and (not any(codes) or step.get("if") == "always()"):
            path = os.pathsep.join([*paths.read_text().splitlines(), str(Path(sys.executable).parent), os.defpath])
            of_step = {"PATH": path} if step["name"] == "Install" else {"PATH": path, "PYTHONPATH": str(ROOT)}
            few = step["run"].replace("--runs 8", "--runs 5").replace("1 2 3 4 5 6 7 8", "1 2 3 4 5")
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", few]
            result = subprocess.run(
                command, cwd=directory, env=environment | of_step, capture_output=True, text=True, timeout=280
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


@pytest.mark.rotates
def test_a_pull_request_that_makes_it_slower(workflow, wheel, tmp_path):
    """In a repository that holds nothing of tracekern. The two checkouts hold different programs."""
    for side, options in {"base": "", "head": "--slow-wait 1.5"}.items():
        (tmp_path / side).mkdir()
        (tmp_path / side / "options").write_text(options)
    program = f'{LAUNCHED} "$TRACEKERN_OUT" $(cat options)'
    codes, output = run_steps(workflow["jobs"]["pull-request"], tmp_path, wheel, program)
    assert codes == [0, 1, 0], output
    assert (tmp_path / "built").read_text().splitlines() == [f"{tmp_path}/base", f"{tmp_path}/head"]
    assert "dispatch.wait_token.p50 regressed" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "tracekern.xml").read_text().count("<failure") >= 1
    assert len(list((tmp_path / "captures").iterdir())) == 2 * (5 + 1), "the warm-ups are kept too"


@pytest.mark.rotates
def test_two_nights(workflow, wheel, tmp_path):
    program = f'{LAUNCHED} "$TRACEKERN_OUT"'
    for night in (1, 2):
        codes, output = run_steps(workflow["jobs"]["nightly"], tmp_path, wheel, program)
        assert codes == [0, 0, 0, 0][night - 1 :], output
        assert len(list((tmp_path / ".tracekern" / "cpu").iterdir())) == night
        assert len((tmp_path / "history.jsonl").read_text().splitlines()) == night
    assert (tmp_path / "trend.html").stat().st_size > 10_000


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
