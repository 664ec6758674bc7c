"""Event tables: mistakes are compile errors that say what is wanted, and every extension has its own."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import tracekern

COMMAND = ("g++", "-std=c++20", f"-I{tracekern.include_path()}")
SOURCE = """#include <tracekern.h>
#define MY_EVENTS(EVENT) EVENT({name}, wait, completion, "{channel}", "{begin}", "{end}")
TK_DEFINE_EVENTS(MyEvent, MY_EVENTS)
extern "C" const char* describe() {{
    static std::string text;
    return (text = tracekern::describe_events<MyEvent>()).c_str();
}}
"""
GOOD = {"name": "wait_row", "channel": "row data row", "begin": "peer:10 row:32", "end": "seen:55"}


def compile_table(directory: Path, *flags: str, **changes: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine")
    source = directory / "table.cpp"
    source.write_text(SOURCE.format(**GOOD | changes))
    return subprocess.run([*COMMAND, *flags, source], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"channel": "row dta row"}, "the channel of wait_row: wanted"),
        ({"channel": "row data raw"}, "the channel of wait_row: wanted"),
        ({"channel": "row"}, "the channel of wait_row: wanted"),
        ({"begin": "peer:10 row"}, "the fields of wait_row: wanted"),
        ({"begin": "peer:10 row:0"}, "the fields of wait_row: wanted"),
        ({"end": "seen:4294967297"}, "the fields of wait_row: wanted"),
        ({"end": "seen:3x"}, "the fields of wait_row: wanted"),
        ({"begin": "peer:10 row:46"}, "the fields of wait_row need more than 55 bits"),
    ],
)
def test_a_mistake_in_a_table_does_not_compile(tmp_path: Path, changes: dict[str, str], wanted: str):
    result = compile_table(tmp_path, "-fsyntax-only", **changes)
    assert result.returncode != 0
    assert wanted in result.stderr


def test_two_extensions_may_name_their_tables_alike(tmp_path: Path):
    described = []
    for name in ("wait_row", "wait_column"):
        library = tmp_path / f"{name}.so"
        assert compile_table(tmp_path, "-shared", "-fPIC", "-o", str(library), name=name).returncode == 0
        describe = ctypes.CDLL(str(library)).describe
        describe.restype = ctypes.c_char_p
        described.append(json.loads(describe())["events"][0]["name"])
    assert described == ["wait_row", "wait_column"]
