"""What `pip install .` and `pip install -e .` give: the extension, the headers for users' kernels, the viewers.

And that make takes the interpreter that it is told.
"""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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


def pip(*arguments: object, cwd: Path) -> None:
    """Without the GPU twin: its kernels take minutes to compile."""
    environment = {**os.environ, "TRACEKERN_CUDA": "0"}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, env=environment)


def run_python(interpreter: Path, code: str, cwd: Path) -> str:
    """What `code` prints, in an interpreter that sees the packages of this one, but not this checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run([interpreter, "-c", code], cwd=cwd, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_wheel_holds_what_an_installation_needs(checkout, tmp_path):
    # The extension that `make` has built of the same sources is taken as it is: it compiles for a minute or two.
    from tracekern import _C

    built = checkout / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "tracekern"
    built.mkdir(parents=True)
    shutil.copy2(_C.__file__, built)
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, checkout, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert any(name.startswith("tracekern/_C.") and name.endswith(".so") for name in names)
    viewers = [path for path in (ROOT / "viewers").rglob("*") if path.suffix in {".py", ".css", ".js", ".sql"}]
    for path in [*(ROOT / "tracekern").rglob("*.py"), *viewers]:
        name = path.relative_to(ROOT).as_posix().replace("viewers/", "tracekern/viewers/", 1)
        assert name.replace("tracekern/tracekern/", "tracekern/") in names
    headers = [path for part in ("trace", "platform") for path in (ROOT / "csrc" / part).glob("*.h*")]
    for path in [ROOT / "csrc" / "tracekern.h", *headers]:
        assert f"tracekern/include/{path.relative_to(ROOT / 'csrc').as_posix()}" in names
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    code = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r}); import tracekern, tracekern._C, tracekern.viewers, os\n"
        "print(os.path.exists(tracekern.include_path() + '/tracekern.h'), tracekern.__file__)"
    )
    assert run_python(Path(sys.executable), code, tmp_path) == f"True {unpacked / 'tracekern' / '__init__.py'}"


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
    from tracekern import _C

    declared = {}
    for node in ast.parse((ROOT / "tracekern" / "_C.pyi").read_text()).body:
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
        for name, value in vars(_C).items()
        if not name.startswith("__")
    }
    assert declared == present
