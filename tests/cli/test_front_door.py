"""The front door: help that every command gives, and one line for each input that it cannot use."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
import typer.core

import tracekern
from tests.conftest import without_dead_runs
from tests.paths import ROOT
from tracekern.cli.app import app
from tracekern.cli.main import main

CAPTURE = ROOT / "traces" / "h200x4"
TRACES = {"CAPTURE": "h200x4", "OTHER_RUN": "cpu_8_ranks", "LATE_HOST": "h200x4_late_host"}
"""Words of the lines below -> kept captures."""
NUM_BESIDE = len(list(CAPTURE.parent.glob("*/capture.json"))) - 1

COMMANDS = (
    "run",
    "record",
    "snapshot",
    "salvage",
    "overhead",
    "info",
    "report",
    "merge",
    "export",
    "open",
    "diff",
    "check",
    "ab",
)

Answer = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def answer(monkeypatch, capfd) -> Answer:
    """Runs `tracekern WORDS...` through the entry point, in this process: exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FORCE_COLOR", raising=False)  # with it a pipe passes for a terminal, and bars are drawn

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(Path(tracekern.__file__).with_name("__main__.py")), *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = capfd.readouterr()
        return end.value.code or 0, said.out, without_dead_runs(said.err)

    return run


def commands_of(group, *words: str) -> dict[tuple[str, ...], typer.core.TyperCommand]:
    """Each command of the group by its words, as it is called; those of its groups come behind it."""
    found = {}
    for name in group.commands:
        _, command, _ = group.resolve_command(None, [name])
        found[(*words, name)] = command
        if hasattr(command, "commands"):
            found |= commands_of(command, *words, name)
    return found


def plain(shown: str) -> str:
    """The text of a help page on one line, without its boxes and colours."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", re.sub(r"\x1b\[[\d;]*m", "", shown)).split())


def test_the_commands_are_those_that_are_tested_here():
    """A fourteenth one needs a help text, and inputs that it refuses, in this file."""
    assert set(commands_of(typer.main.get_command(app))) == {
        *((name,) for name in COMMANDS),
        ("run", "moe"),
        ("run", "fabric"),
    }
    refusing = {line.split()[0] for line, *_ in BAD_INPUTS.values()}
    assert refusing == {*COMMANDS, "inof"}


@pytest.mark.parametrize("asked", ["--help", "-h"])
@pytest.mark.parametrize("name", [*COMMANDS, "run moe", "run fabric"])
def test_help_has_a_sentence_an_example_and_a_text_for_each_option(answer, name, asked):
    exit_code, out, err = answer(*name.split(), asked)
    assert (exit_code, err) == (0, "")
    shown = plain(out)
    command = commands_of(typer.main.get_command(app))[tuple(name.split())]

    description = " ".join(command.help.partition("\n\n")[0].split())
    assert re.match(r"[A-Z][^\n]*\.$", description)
    assert description in shown

    example = plain(command.epilog)
    assert example.startswith("Example: tracekern ")
    assert f"tracekern {name}" in example
    assert shown.endswith(example)

    for parameter in command.params:
        assert parameter.help, parameter.name
        for option in filter(lambda text: text.startswith("-"), (*parameter.opts, *parameter.secondary_opts)):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown), option
        if name != "run moe":  # whose help puts names of variants in place of some texts
            first_words = " ".join(parameter.help.split("{")[0].split()[:3])
            assert first_words in shown, parameter.name


BAD_INPUTS = {
    # What is not a command, an option or an argument at all.
    "an unknown command": ("inof CAPTURE", "no such command 'inof'", "Did you mean 'info'"),
    "an unknown option": ("info CAPTURE --verbose", "no such option: --verbose", "see tracekern info --help"),
    "an argument that is not there": ("diff CAPTURE", "missing argument 'B'", "see tracekern diff --help"),
    "an option that has to be given": (
        "merge CAPTURE",
        "missing option '--output' / '-o'",
        "see tracekern merge --help",
    ),
    "a word that is no number": ("ab --base true --head true --runs many", "'--runs'", "valid integer"),
    "rows of nothing known": ("export CAPTURE -o t.json --tracks thread", "'thread'", "'block', 'warp'"),
    # The workload.
    "an unknown workload": ("run train.py", "run train.py: no such workload", "wanted moe"),
    "an unknown variant": ("run moe -o out --variant quick", "--variant is 'quick'", "wanted one of reference"),
    "no ranks": ("run moe -o out --ranks 0", "--ranks is 0", "wanted 1 to 64"),
    "more choices than experts": ("run moe -o out --topk 9 --experts 8", "top-k 9 of 8 experts", "cannot choose more"),
    "experts that do not divide": ("run moe -o out --ranks 3", "64 experts do not divide over 3 ranks", "such as 66"),
    "room that is no number": ("run moe -o out --records-per-track all", "got 'all'", "wanted auto or a number"),
    "an unknown option of variants": (
        "run moe -o out --option parts=4",
        "--option is 'parts'",
        "one of dispatch_dtype, partitions",
    ),
    "a trace and no place for it": ("run moe", "no place for the capture", "-o DIR"),
    "a profiler and no trace": ("run moe --no-trace --torch-profiler", "--torch-profiler", "leave one of them out"),
    "a file where a capture shall be": (
        "run moe -o file.txt",
        "file.txt: cannot be made a directory",
        "choose another",
    ),
    "an unknown backend to measure": ("overhead --backend tpu", "--backend is 'tpu'", "wanted one of auto, cpu, cuda"),
    # A program of the user's own.
    "a program and no place for it": ("record true", "missing option '--output' / '-o'", "see tracekern record --help"),
    "a program that is not there": ("record -o out no-program", "cannot run no-program", "No such file"),
    "a file where its capture shall be": ("record -o file.txt true", "file.txt: cannot be written", "choose another"),
    # Runs that are going on, or were killed.
    "a snapshot of no run": ("snapshot no-run -o out", "run no-run: no capture is open", "programs that are inside"),
    "nothing to salvage": ("salvage no-run -o out", "run no-run: nothing of it is left", "salvage` lists what is"),
    "a place for no run": ("salvage -o out", "-o out", "name the run"),
    # Captures and traces.
    "no such capture": ("info missing", "missing: no such file or directory", "name a capture directory"),
    "a directory that is no capture": ("report empty", "empty: no rank_*.tkdump in it", "the one given to capture()"),
    "an empty dump": ("info empty.pftrace", "empty.pftrace: 0 bytes, wanted at least 64", "copy it again"),
    "a damaged capture": ("export cut -o t.json", "rank_00001.tkdump: 5000 bytes", "copy it again"),
    "what is no dump": ("merge other/rank_00000.tkdump -o t.json", "starts with b'nonsense'", "wanted b'TKDUMP"),
    "an empty trace": ("open empty.pftrace", "open: empty.pftrace is empty", "wanted a trace"),
    "a table to open": ("open spans.parquet", "Perfetto reads .pftrace and .json", "export it to one of them"),
    "what describes a capture, to open": ("open cut/capture.json", "describes a capture", "wanted a trace"),
    "the trace of a capture": ("report CAPTURE/trace.pftrace.gz", "name its capture directory", str(CAPTURE)),
    "the directory of captures": ("report CAPTURE/..", "cpu_8_ranks is one", f"and {NUM_BESIDE} more beside it are"),
    "one rank of four": ("merge CAPTURE/rank_00000.tkdump -o t.json", "3 of 4 ranks have no dump: 1-3", "--partial"),
    "captures of two runs": ("merge CAPTURE OTHER_RUN -o t.json", "run '", "merge one run at a time"),
    "a damaged host trace": ("merge CAPTURE -o t.json --host 0=bad.json", "bad.json: not a Chrome trace", "export it"),
    "a host trace of no rank": ("export CAPTURE -o t.json --host 9=bad.json", "rank 9", "ranks are [0, 1, 2, 3]"),
    # The part that is wanted.
    "a key that no launch has": ("report CAPTURE --key layer-1", "no launch has the key 'layer-1'", "there are none"),
    "two parts": ("report CAPTURE --key a --window 0:1us", "--key, --window", "give one of them"),
    "a window that ends before it begins": (
        "merge CAPTURE -o t.json --window 5us:1us",
        "5000 ns to 1000 ns",
        "after its",
    ),
    "a window of nothing": ("export CAPTURE -o t.json --window 1s:2s", "from 1.00 s to 2.00 s", "the records lie"),
    "a window without kernels": ("report CAPTURE --window 9s:10s", "by kernels from 9.00 s to 10.0 s", "records lie"),
    "a rank that is not there": ("report CAPTURE --ranks 9 -o r.html", "rank 9 is not in", "has ranks 0-3"),
    "a window beyond all numbers": (
        f"report CAPTURE --window 0:{'9' * 400}s -o r.html",
        "is no time",
        "as in 1.5ms:2ms",
    ),
    "a rank that is no number": (
        "export CAPTURE -o t.json --host \u00b2=bad.json",
        "got '\u00b2=bad.json'",
        "wanted RANK=FILE",
    ),
    "a link that reaches nothing": ("report CAPTURE --link-limit 0", "--link-limit: got 0", "GB/s above 0"),
    # What to write.
    "an unknown suffix": ("export CAPTURE -o t.csv", "t.csv: the suffix picks the format", ".pftrace, .pftrace.gz"),
    "a page of another suffix": ("report CAPTURE -o r.pdf", "r.pdf: the report is a page", "ends in .html"),
    "a folder that is not there": ("merge CAPTURE -o no/t.json", "no/t.json: its folder does not", "mkdir -p no"),
    "a file for a folder": ("report CAPTURE -o file.txt/r.html", "file.txt is a file", "wanted a folder"),
    "a name that is too long": (f"export CAPTURE -o {'n' * 300}.json", "File name too long", "name another place"),
    "a place in a page": ("diff CAPTURE CAPTURE --at moe#1 -o d.html", "--at", "name the trace"),
    "a launch that is not there": ("diff CAPTURE CAPTURE --at dispatch_send#9 -o d.json", "has no launch 9", "of "),
    # The gate.
    "nothing to check": ("check CAPTURE", "nothing to check", "give --against BASELINE"),
    "a budget without a limit": ("check CAPTURE --max wait_token.p99", "'wait_token.p99'", "wanted NAME=LIMIT"),
    "a trend of no history": ("check CAPTURE --save --trend t.html", "--trend", "--append names; give both"),
    "no baseline yet": ("check CAPTURE --against latest", "no baseline in", "keep one with"),
    "budgets that cannot be read": ("check CAPTURE --config bad.json", "bad.json: cannot be read", "fix it, or"),
    "a floor that is no number": ("ab --base true --head true --floor low", "--floor: got 'low'", "as in 5%"),
    "a baseline that is not there": ("check CAPTURE --against gone.json", "gone.json: cannot be read", "name a "),
    "too few launches to hold": ("check CAPTURE --save --min-runs 2", "--min-runs: got 2", "wanted at least 5"),
    "a place that is not empty": ("ab --base true --head true -o other", "other: is not empty", "a new directory"),
    "no time at all": ("ab --base true --head true --timeout 0", "--timeout: got 0", "wanted seconds above 0"),
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The working directory, with things of which a command can make nothing."""
    ignored = shutil.ignore_patterns("*.gz", "README.md")
    shutil.copytree(CAPTURE, tmp_path / "cut", ignore=ignored)
    dump = tmp_path / "cut" / "rank_00001.tkdump"
    dump.write_bytes(dump.read_bytes()[:5000])
    for folder in ("empty", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "other" / "rank_00000.tkdump").write_text("nonsense" * 100)
    (tmp_path / "empty.pftrace").touch()
    (tmp_path / "file.txt").write_text("words")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "spans.parquet").write_text("PAR1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(line: str) -> list[str]:
    """The words of a line above, with the paths of the kept captures in it."""
    for word, name in TRACES.items():
        line = line.replace(word, shlex.quote(str(CAPTURE.with_name(name))))
    return shlex.split(line)


def everything_in(folder: Path) -> dict[Path, bytes | None]:
    """Each path below the folder, with what a file holds."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def check_refusal(told: tuple[int, str, str], wrong: str, wanted: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that says what was wrong and what was wanted."""
    exit_code, out, err = told
    assert (exit_code, out) == (2, ""), err
    assert err.startswith("tracekern: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1, err
    assert wrong in err
    assert wanted in err


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_input_is_one_line_that_says_what_to_do(answer, place, name):
    line, wrong, wanted = BAD_INPUTS[name]
    before = everything_in(place)
    check_refusal(answer(*words_of(line)), wrong, wanted)
    assert everything_in(place) == before


@pytest.mark.parametrize(
    "line",
    [
        *(f"{command} -o" for command in ("run moe", "merge CAPTURE", "export CAPTURE", "report CAPTURE", "salvage")),
        *("diff CAPTURE CAPTURE -o", "snapshot -o", "ab --base true --head true -o"),
        *(f"check CAPTURE {option}" for option in ("--append", "--trend", "--junit", "--markdown")),
    ],
)
def test_an_empty_name_to_write_to_is_refused(answer, place, line):
    check_refusal(answer(*words_of(f"{line} ''")), "is empty; ", "wanted a file")


@pytest.mark.parametrize("name", ["an unknown command", "an unknown option", "a trace and no place for it"])
def test_so_it_is_in_a_process_of_its_own(command_line, name):
    line, wrong, wanted = BAD_INPUTS[name]
    result = command_line(*words_of(line))
    check_refusal((result.returncode, result.stdout, result.stderr), wrong, wanted)


@pytest.mark.parametrize("words", [(), ("run",)], ids=["tracekern", "tracekern run"])
def test_a_group_without_a_command_shows_its_help_alone(answer, words):
    _, out, err = answer(*words)
    assert err == ""
    assert plain(out) == plain(answer(*words, "--help")[1])
