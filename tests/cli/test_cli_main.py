"""Where commands write when their standard streams are closed, full, left by their reader, or somebody's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from captures import CaptureSpec, write_capture

from tests.paths import ROOT

TRACES = ROOT / "traces"


@pytest.fixture(scope="module")
def capture(tmp_path_factory) -> Path:
    return write_capture(tmp_path_factory.mktemp("capture"), CaptureSpec(num_ranks=3, host_spans=4))


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_are_no_fault(capture, tmp_path, closed):
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    output = tmp_path / "out.pftrace"
    command = [sys.executable, "-m", "tracekern", "merge", capture, "-o", output]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=close)
    assert (result.returncode, result.stderr) == (0, "")
    assert output.stat().st_size > 0


def test_a_full_disk_behind_stdout_is_one_line(capture):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "tracekern", "info", capture]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("tracekern: output: No space left on device; ")


@pytest.mark.parametrize(
    "words",
    [
        ("info", "CAPTURE"),
        ("info", "CAPTURE", "--json"),
        ("diff", "CAPTURE", "CAPTURE"),
        ("export", "CAPTURE", "-o", "t.json"),
        ("salvage", "--json"),
        ("overhead", "--help"),
    ],
    ids=" ".join,
)
def test_a_reader_that_leaves_early_is_no_fault(capture, tmp_path, words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tracekern", *(str(capture) if word == "CAPTURE" else word for word in words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, stdout=writer, stderr=writer, timeout=120, cwd=tmp_path, env=environment)
    os.close(writer)
    assert result.returncode == 0


def test_unbuffered_output_comes_at_once_and_may_lose_its_reader(capture):
    command = [sys.executable, "-u", "-m", "tracekern", "info", capture]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=120)) == ("", 0)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_an_encoding_without_our_signs_is_no_fault(capture, encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "tracekern", "info", TRACES / "h200x4"]
    plain, other = (
        subprocess.run(command, capture_output=True, timeout=120, env=env) for env in (os.environ, environment)
    )
    assert (other.returncode, other.stdout.count(b"\n")) == (0, plain.stdout.count(b"\n")), other.stderr
    assert not plain.stdout.isascii()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("diff", "CAPTURE", "CAPTURE", "-o", "d.html"), r"A: \udcffcapture"),
        (("report", "CAPTURE", "-o", "r.html"), "r.html: open it"),
        (("export", "CAPTURE", "-o", os.fsdecode(b"\xff.pftrace")), r"\udcff.pftrace: "),
        (("check", "CAPTURE", "--against", "CAPTURE", "--junit", "j.xml", "--markdown", "m.md"), "cannot say: "),
        (("info", os.fsdecode(b"no\n\xff")), r"tracekern: no\n\udcff: no such file"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_names_of_files_are_any_bytes(capture, tmp_path, words, says):
    (tmp_path / os.fsdecode(b"\xffcapture")).symlink_to(capture)
    words = [os.fsdecode(b"\xffcapture") if word == "CAPTURE" else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"}
    result = subprocess.run(
        [sys.executable, "-m", "tracekern", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment,
    )
    assert says in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_a_working_directory_that_is_gone_is_one_line(capture, tmp_path):
    command = [sys.executable, "-m", "tracekern", "report", capture, "-o", "z.html"]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=tmp_path.rmdir,
    )
    said = "tracekern: the working directory does not exist any more; go to another one\n"
    assert (result.returncode, result.stderr) == (2, said)


@pytest.mark.parametrize("module", ["tracekern.cli.app", "tracekern.analysis.findings"])
def test_an_interrupt_is_one_line_wherever_it_comes(capture, module):
    """At the import of a module: before the command runs, and within it."""
    program = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        f"sys.argv[1:] = ['report', {str(capture)!r}]\n"
        "from tracekern.cli.main import main\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "tracekern: interrupted\n")


def test_a_program_that_calls_the_command_may_have_streams_of_its_own():
    program = (
        "import io, sys; sys.argv[1:] = ['--version']; sys.stdout = io.StringIO()\n"
        "from tracekern.cli.main import main\n"
        "try: main()\n"
        "finally: sys.__stdout__.write(sys.stdout.getvalue())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.split()[0]) == (0, "tracekern"), result.stderr
