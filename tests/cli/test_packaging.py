"""What `pip install .` and `pip install -e .` give: the extension, the headers for users' kernels, the viewers.

And that make takes the interpreter that it is told.
"""

from __future__ import annotations

import ast
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pybind11
import pytest
from toolchains import require

from tests.paths import ROOT

FAMILIES = [path.parent.name for path in (ROOT / "csrc" / "moe").glob("*/bindings.cpp")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources, with nothing built."""
    copy = tmp_path_factory.mktemp("checkout") / "tracekern"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout: cannot tell the sources from what was built")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


def build(*command: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs python. Without the GPU twin, unless a variable says so: its kernels take minutes to compile."""
    dropped = ("PYTHONPATH", "CC", "CXX", "TRACEKERN_EXTENSION")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    environment |= {"TRACEKERN_CUDA": "0", **variables}
    command = (sys.executable, *map(str, command))
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


def make_wheel(source: Path, folder: Path, **variables: str) -> Path:
    """The directory where what `pip wheel` made is unpacked."""
    options = ("--disable-pip-version-check", "--no-build-isolation", "--no-deps", "--wheel-dir", folder)
    made = build("-m", "pip", "wheel", *options, source, cwd=folder, **variables)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory) -> Path:
    """What a wheel installs. Extensions that `make` has built of the same sources are taken as they are."""
    built = checkout / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "tracekern"
    built.mkdir(parents=True)
    for path in (ROOT / "tracekern").glob("_*.so"):
        shutil.copy2(path, built)
    return make_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def bare(checkout, tmp_path_factory) -> Path:
    """What is installed from the source distribution where there is no compiler."""
    folder = tmp_path_factory.mktemp("bare")
    made = build("setup.py", "-q", "sdist", "--dist-dir", folder, cwd=checkout)
    assert made.returncode == 0, made.stderr
    (archive,) = folder.glob("*.tar.gz")
    return make_wheel(archive, folder, PATH=str(folder))


def names_in(folder: Path) -> set[str]:
    """Without what imports leave there."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {path.relative_to(folder).as_posix() for path in found}


def test_the_wheel_holds_what_an_installation_needs(installed, tmp_path):
    names = names_in(installed)
    extensions = {name.partition(".")[0] for name in names if name.endswith(".so")}
    assert extensions >= {f"tracekern/_{name}" for name in ("core", *FAMILIES)}
    viewers = [path for path in (ROOT / "viewers").rglob("*") if path.suffix in {".py", ".css", ".js", ".sql"}]
    for path in [*(ROOT / "tracekern").rglob("*.py"), *viewers]:
        name = path.relative_to(ROOT).as_posix().replace("viewers/", "tracekern/viewers/", 1)
        assert name.replace("tracekern/tracekern/", "tracekern/") in names
    headers = [path for part in ("trace", "platform") for path in (ROOT / "csrc" / part).glob("*.h*")]
    for path in [*(ROOT / "csrc").glob("tracekern*"), *headers]:
        assert f"tracekern/include/{path.relative_to(ROOT / 'csrc').as_posix()}" in names
    code = "import tracekern, tracekern._core, tracekern.viewers; print(tracekern.include_path())"
    told = build("-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert told.stdout.strip() == str(installed / "tracekern" / "include"), told.stderr


def test_all_packages_that_are_asked_for_are_imported(installed):
    (about,) = installed.glob("*.dist-info/METADATA")
    packages = re.findall(r"^Requires-Dist: (\w+)", about.read_text(), re.MULTILINE)
    assert "numpy" in packages
    sources = "\n".join(path.read_text() for path in (installed / "tracekern").rglob("*.py"))
    assert [name for name in packages if not re.search(rf"^ *(import|from) {name}\b", sources, re.MULTILINE)] == []


def test_an_installation_has_all_headers_of_a_kernel(installed):
    folders = [installed / "tracekern" / "include", pybind11.get_include(), sysconfig.get_paths()["include"]]
    require("g++")
    command = ["g++", "-std=c++20", "-E", *(f"-I{folder}" for folder in folders)]  # all that may be missing is a header
    done = subprocess.run([*command, ROOT / "examples" / "signals" / "signals.cpp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_the_same_is_installed_except_for_the_extension(installed, bare):
    missing = {name.partition(".cpython")[0] for name in names_in(installed) - names_in(bare)}
    # The transfer engine is built where libfabric's headers are.
    assert missing - {"tracekern/_fabric"} == {f"tracekern/_{name}" for name in ("core", *FAMILIES)}
    assert names_in(bare) <= names_in(installed)


MISSING = "tracekern was installed without its compiled extension, which "
COMMANDS = (
    ("info {capture}", 0, "4 ranks, "),
    ("report {capture} -o report.html", 0, "the largest cost is rank 0's gaps "),
    ("check {capture} --max wait_token.p99=20us", 0, "within budget"),
    ("diff {capture} {capture} -o both.json", 0, "+0.0 %"),
    ("export {capture} -o a.json.gz", 0, "a.json.gz: "),
    ("export {capture} -o a.parquet", 0, "a.parquet: "),
    ("export {capture} -o a.pftrace", 2, "; or write .json, which needs none of it"),
    ("info unfinished", 2, "unfinished: "),
    ("report unfinished", 2, "unfinished: "),
    ("run moe", 2, MISSING),
    ("snapshot", 2, MISSING),
    ("salvage", 2, MISSING),
)


def test_without_a_compiler_all_that_reads_works_and_the_rest_says_what_to_do(bare, tmp_path):
    capture = ROOT / "traces" / "h200x4_late_host"
    (tmp_path / "unfinished").mkdir()
    shutil.copy(capture / "capture.json", tmp_path / "unfinished")
    lines = [line.format(capture=capture) for line, _, _ in COMMANDS]
    done = build(ROOT / "tests" / "elsewhere.py", *lines, cwd=tmp_path, PYTHONPATH=str(bare), COLUMNS="200")
    assert done.returncode == 0, done.stderr
    for (line, *expected), (code, said) in zip(COMMANDS, json.loads(done.stdout), strict=True):
        assert [code, line, expected[1] in said] == [expected[0], line, True], said
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"unfinished", "report.html", "both.json", "a.json.gz", "a.parquet"}


@pytest.mark.parametrize(
    ("command", "variables", "told"),
    [
        ("build", {"TRACEKERN_EXTENSION": "1"}, "tracekern._core cannot be compiled; it needs g++ with C++20: "),
        ("build_ext", {}, "tracekern._core cannot be compiled; it needs g++ with C++20: "),
        ("build", {"TRACEKERN_CUDA": "1"}, "TRACEKERN_CUDA=1, but there is no nvcc on the PATH"),
        ("build", {"TRACEKERN_CUDA": "yes"}, "TRACEKERN_CUDA is 'yes'; wanted 1 "),
        ("build", {"TRACEKERN_BUILD_JOBS": "0"}, "TRACEKERN_BUILD_JOBS is '0'; wanted how many compilers "),
    ],
)
def test_who_asks_for_a_part_that_cannot_be_compiled_is_refused(checkout, tmp_path, command, variables, told):
    folders = ("--build-temp", tmp_path, "--build-lib", tmp_path)
    done = build("setup.py", "-q", command, *folders, cwd=checkout, PATH=str(tmp_path), **variables)
    assert done.returncode == 1
    assert told in done.stderr


NVCC = """#!/bin/sh
mkdir "$COUNTED/$$"
ls "$COUNTED" | wc -l >> "$COUNTED.most"
for word in "$@"; do out=$word; [ "$before" = -o ] && echo "$@" > "$word"; before=$word; done
sleep 0.1
rmdir "$COUNTED/$$"
"""
"""A stand-in that counts how many of it run at a time; the real one would take minutes."""


def test_kernels_for_gpus_are_compiled_on_request_by_as_many_compilers_as_asked_for(checkout, installed, tmp_path):
    (tmp_path / "counted").mkdir()
    (tmp_path / "nvcc").write_text(NVCC)
    (tmp_path / "nvcc").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    about = {"PATH": path, "COUNTED": str(tmp_path / "counted"), "TRACEKERN_BUILD_JOBS": "2"}
    command = ("setup.py", "build", "--build-temp", tmp_path / "temp")
    has_gpu = bool(glob.glob("/dev/nvidia[0-9]*"))
    done = build(*command, cwd=checkout, TRACEKERN_CUDA="", **about)
    assert ("tracekern._cuda is left out: nvcc is here, but no GPU" in done.stdout + done.stderr) is not has_gpu
    done = build(*command, cwd=checkout, TRACEKERN_CUDA="1", TRACEKERN_CUDA_ARCH="sm_90", **about)
    assert done.returncode == 0, done.stderr
    files = list((ROOT / "csrc").rglob("*.cu"))
    for number in range(1, len(files) + 1):
        assert f"[{number}/{len(files)}] nvcc sm_90a csrc/" in done.stdout + done.stderr
    most = max(map(int, (tmp_path / "counted.most").read_text().split()))
    assert most == 2


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("script", "code"), [(f'exec "{sys.executable}" "$@"', 0), ("echo Python 3.9.1 of /old", 2)])
def test_make_refuses_an_interpreter_that_its_environment_does_not_have(tmp_path, script, code):
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    (tmp_path / ".venv" / "created").touch()
    command = ["make", ".venv/created", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code
    told = f".venv is Python 3.9.1 of /old; wanted {sys.executable}, Python {platform.python_version()} of"
    assert (told in done.stderr) == (code != 0)


def test_the_stub_names_what_the_extension_has():
    from tracekern import _core

    declared = {}
    for node in ast.parse((ROOT / "tracekern" / "_core.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            declared[node.name] = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            declared[node.name] = set()
        elif isinstance(node, ast.AnnAssign):
            declared[ast.unparse(node.target)] = set()
    present = {
        name: {member for member in vars(value) if member == "__init__" or not member.startswith("_")}
        if isinstance(value, type)
        else set()
        for name, value in vars(_core).items()
        if not name.startswith("__")
    }
    assert declared == present
