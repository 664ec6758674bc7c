"""Event tables: mistakes are compile errors that say what is wanted, and every file of every extension has its own."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
from pathlib import Path

import pytest
from toolchains import require

import tracekern

pytestmark = pytest.mark.programs("csrc/tracekern.h")

COMMAND = ("g++", "-std=c++20", f"-I{tracekern.include_path()}")
SOURCE = """#include <tracekern.h>
#define MY_EVENTS(EVENT) EVENT({name}, {class}, completion, "{channel}", "{begin}", "{end}")
TK_DEFINE_EVENTS(MyEvent, MY_EVENTS)
extern "C" const char* describe() {{
    static std::string text;
    return (text = tracekern::describe_events<MyEvent>()).c_str();
}}
"""
GOOD = {
    "name": "wait_row",
    "class": "wait",
    "channel": "row data row",
    "begin": "peer:10 row:13",
    "end": "seen:32",
}
TOO_WIDE = "the fields of wait_row need more than 55 bits together"
END_TOO_WIDE = "the end fields of wait_row, which is stored when it opens: wanted at most 32 bits"


def compile_table(directory: Path, *flags: str, **changes: str) -> subprocess.CompletedProcess[str]:
    require("g++")
    source = directory / "table.cpp"
    source.write_text(SOURCE.format(**GOOD | changes))
    return subprocess.run([*COMMAND, *flags, source], capture_output=True, text=True)


def compile_cases(
    directory: Path, cases: list[str], *include: str, compiler: str = "g++"
) -> subprocess.CompletedProcess[str]:
    """All in one file, each in a namespace case_NUMBER."""
    require(compiler)
    text = "".join(f"#include <{name}>\n" for name in ("tracekern.h", *include))
    for number, case in enumerate(cases):
        text += f'#undef MY_EVENTS\n#line 1 "case_{number}"\nnamespace case_{number} {{\n{case}\n}}\n'
    (directory / "cases.cpp").write_text(text)
    command = [compiler, *COMMAND[1:], "-fsyntax-only", directory / "cases.cpp"]
    return subprocess.run(command, capture_output=True, text=True)


def assert_refused(done: subprocess.CompletedProcess[str], wanted: list[str]) -> None:
    """Each case is refused for its own reason: an error with the words that are wanted is about it."""
    errors: list[list[str]] = [[]]
    for line in done.stderr.splitlines():
        begins = not line.startswith(" ") and ": note: " not in line
        if begins and any(": error: " in line for line in errors[-1]):
            errors.append([])
        errors[-1].append(line)
    for number, words in enumerate(wanted):
        own = ["\n".join(error) for error in errors if re.search(rf"\bcase_{number}\b", "\n".join(error))]
        assert any(words in error for error in own), f"case {number}, wanted {words}: {own}"


def table(**changes: str) -> str:
    """The part of SOURCE that a case needs."""
    return "\n".join(SOURCE.format(**GOOD | changes).splitlines()[1:3])


MISTAKES = [
    ({"channel": "row dta row"}, "the channel of wait_row: wanted"),
    ({"channel": "row data raw"}, "the channel of wait_row: wanted"),
    ({"channel": "row"}, "the channel of wait_row: wanted"),
    ({"channel": " "}, "the channel of wait_row: wanted"),
    ({"channel": "row count row initial=8"}, "of credit and count first initial=NUMBER"),
    ({"channel": "row credit initial=8 initial=8"}, "of credit and count first initial=NUMBER"),
    ({"begin": "peer:10 row"}, "the fields of wait_row: wanted"),
    ({"begin": "peer:10 row:0"}, "the fields of wait_row: wanted"),
    ({"end": "seen:4294967297"}, "the fields of wait_row: wanted"),
    ({"end": "seen:3x"}, "the fields of wait_row: wanted"),
    ({"begin": "peer:10 row:46"}, TOO_WIDE),
    ({"begin": "peer:10 row:14"}, TOO_WIDE),
    ({"begin": "row:1", "end": "seen:55", "class": "work"}, TOO_WIDE),
    ({"begin": "row:1", "end": "seen:33"}, END_TOO_WIDE),
    ({"begin": "row:1", "end": "seen:23 peer:10", "class": "signal"}, END_TOO_WIDE),
    ({"begin": "row:1", "end": "seen:33", "class": "sync"}, END_TOO_WIDE),
]


def test_a_mistake_in_a_table_does_not_compile(tmp_path: Path):
    names = [f"wait_{number}" for number in range(len(MISTAKES))]
    cases = [table(name=name, **changes) for name, (changes, _) in zip(names, MISTAKES, strict=True)]
    wanted = [words.replace("wait_row", name) for name, (_, words) in zip(names, MISTAKES, strict=True)]
    assert_refused(compile_cases(tmp_path, cases), wanted)


def test_a_table_may_use_every_bit(tmp_path: Path):
    changes = [
        {},
        {"class": "work", "begin": "row:22", "end": "seen:33"},
        {"class": "work", "begin": "", "end": "seen:55", "channel": ""},
        {"class": "signal", "begin": "row:55", "end": ""},
        {"class": "sync"},
    ]
    assert compile_cases(tmp_path, [table(**change) for change in changes]).stderr == ""


ONE_END = "take one value for each field at the event's end"
ONE_EACH = "one value for each field at the event's begin"
IF_WITHIN = "TK_WAIT(recorder, MyEvent::wait_row, 1, 2);\n{ if (x) TK_WAIT_IF(recorder, x, MyEvent::wait_row, 1, 2); }"
ENDS = ("TK_END();", "TK_END_IF(true);", "TK_END(1, 2);", "TK_END_AFTER(1);")
SPANS = [
    *(
        (recorder, f"TK_WAIT(recorder, MyEvent::wait_row, 1, 2); {end}", ONE_END)
        for recorder in ("Recorder<true>", "Recorder<false>")
        for end in ENDS
    ),
    ("Recorder<true>", "TK_WAIT(recorder, MyEvent::wait_row); TK_END(1);", ONE_EACH),
    ("Recorder<false>", "TK_WAIT(recorder, MyEvent::wait_row); TK_END(1);", ONE_EACH),
    ("Recorder<false>", "TK_WAIT_IF(recorder, x, MyEvent::wait_row, 1); TK_END(1);", ONE_EACH),
    ("Recorder<false>", "TK_SEQUENCE(recorder); TK_NEXT(MyEvent::wait_row);", ONE_EACH),
    ("Recorder<true>", "if (x) TK_WAIT(recorder, MyEvent::wait_row, 1, 2);", "tk_span_needs_braces"),
    ("Recorder<false>", IF_WITHIN, "tk_span_needs_braces"),
]
"""What would mean nothing, and why it does not compile."""


def kernel_with(recorder: str, body: str) -> str:
    return f"{table()}\nusing namespace tracekern; void kernel({recorder}& recorder, bool x) {{\n{body}\n}}"


def test_a_span_that_would_mean_nothing_does_not_compile(tmp_path: Path):
    wrong = [kernel_with(recorder, body) for recorder, body, _ in SPANS]
    assert_refused(compile_cases(tmp_path, wrong), [words for _, _, words in SPANS])
    right = [kernel_with(recorder, "TK_WAIT(recorder, MyEvent::wait_row, 1, 2); TK_END(1);") for recorder, *_ in SPANS]
    assert compile_cases(tmp_path, right).returncode == 0


CLASHING = """
struct Warp {}; struct WarpGroup {}; struct Half {}; struct Span {}; struct Sequence {}; struct Record {};
constexpr int kLanes = 64;
inline void wait(Warp) {}
inline void signal(WarpGroup, Half, Span, Sequence, Record) {}
using namespace tracekern::api;
void kernel(Recorder<true>& recorder) {
    TK_WAIT(recorder, MyEvent::wait_row, 1, kLanes);
    wait(Warp{});
    signal(WarpGroup{}, Half{}, Span{}, Sequence{}, Record{});
    TK_END(1);
}
"""


def test_a_project_keeps_its_own_names_beside_those_that_kernels_need(tmp_path: Path):
    source = tmp_path / "kernel.cpp"
    source.write_text(SOURCE.format(**GOOD) + CLASHING)
    subprocess.run([*COMMAND, "-fsyntax-only", source], check=True)
    source.write_text(SOURCE.format(**GOOD) + CLASHING.replace("tracekern::api", "tracekern"))
    clash = subprocess.run([*COMMAND, "-fsyntax-only", source], capture_output=True, text=True)
    assert "is ambiguous" in clash.stderr


def test_two_extensions_may_name_their_tables_alike(tmp_path: Path):
    described = []
    for name in ("wait_row", "wait_column"):
        library = tmp_path / f"{name}.so"
        assert compile_table(tmp_path, "-shared", "-fPIC", "-o", str(library), name=name).returncode == 0
        describe = ctypes.CDLL(str(library)).describe
        describe.restype = ctypes.c_char_p
        described.append(json.loads(describe())["events"][0]["name"])
    assert described == ["wait_row", "wait_column"]


def test_two_files_of_an_extension_may_name_their_tables_alike(tmp_path: Path):
    sources = []
    for name in ("wait_row", "wait_column"):
        sources.append(tmp_path / f"{name}.cpp")
        sources[-1].write_text(SOURCE.format(**GOOD | {"name": name}).replace("describe()", f"describe_{name}()"))
    library = tmp_path / "both.so"
    subprocess.run([*COMMAND, "-shared", "-fPIC", "-o", library, *sources], check=True)
    for name in ("wait_row", "wait_column"):
        describe = getattr(ctypes.CDLL(str(library)), f"describe_{name}")
        describe.restype = ctypes.c_char_p
        assert json.loads(describe())["events"][0]["name"] == name


KERNEL = """#include <tracekern.h>

#include <platform/cpu_executor.hpp>
#define MY_EVENTS(EVENT) EVENT(copy_row, work, issue, "", "row:32", "") EVENT(wait_row, wait, completion, "", "", "")
namespace mine {
TK_DEFINE_EVENTS(MyEvent, MY_EVENTS)
template <class Rec>
void copy(tracekern::Warp& warp, typename Rec::Args trace) {
    Rec recorder(trace, warp);
    TK_RANGE(recorder, MyEvent::copy_row, warp.block);
    {
        TK_WAIT(recorder, MyEvent::wait_row);
        constexpr MyEvent kInside = MyEvent::copy_row;
        const auto inside = [&] { TK_RANGE(recorder, kInside, 1); };
        inside();
    }
}
template void copy<tracekern::Recorder<true>>(tracekern::Warp&, tracekern::Recorder<true>::Args);
template void copy<tracekern::Recorder<false>>(tracekern::Warp&, tracekern::Recorder<false>::Args);
}  // namespace mine
"""
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror", "-fsyntax-only")


def compile_kernel(directory: Path, compiler: str, *flags: str) -> subprocess.CompletedProcess[str]:
    require(compiler)
    source = directory / "kernel.cpp"
    source.write_text(KERNEL)
    return subprocess.run([compiler, *COMMAND[1:], *flags, source], capture_output=True, text=True)


@pytest.mark.parametrize("compiler", ["g++", "clang++-19"])
def test_a_project_may_have_its_namespace_and_its_warnings(tmp_path: Path, compiler: str):
    assert compile_kernel(tmp_path, compiler, *STRICT).stderr == ""


def test_a_standard_that_is_too_old_is_named(tmp_path: Path):
    result = compile_kernel(tmp_path, "g++", "-std=c++17", "-fsyntax-only")
    assert "tracekern.h needs C++20" in result.stderr.splitlines()[1]


LOOKS = [
    ("TK_WAIT(recorder, MyEvent::copy_row, 1);", "TK_WAIT is for events of class wait"),
    ("TK_SIGNAL(recorder, MyEvent::wait_row);", "TK_SIGNAL for those of class signal"),
    # One statement, as it looks: it was two, and the span was there whatever the block.
    ("if (warp.block) TK_WAIT(recorder, MyEvent::wait_row);\n        TK_END();", "tk_span_needs_braces"),
]


@pytest.mark.parametrize("compiler", ["g++", "clang++-19"])
def test_a_span_that_is_not_what_it_looks_like_does_not_compile(tmp_path: Path, compiler: str):
    kernel = KERNEL.partition("cpu_executor.hpp>\n")[2]
    kernel = kernel.replace("TK_RANGE(recorder, MyEvent::copy_row, warp.block);", "")
    cases = [kernel.replace("TK_WAIT(recorder, MyEvent::wait_row);", instead) for instead, _ in LOOKS]
    done = compile_cases(tmp_path, cases, "platform/cpu_executor.hpp", compiler=compiler)
    assert_refused(done, [words for _, words in LOOKS])
