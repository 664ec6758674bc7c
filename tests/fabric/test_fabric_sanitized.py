"""Transfer engines under the sanitizers: all calls at once, from several threads, and engines stopped meanwhile."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import rehearsal
from attack import NOTICED, assert_right, in_process, run_program
from toolchains import CSRC, GXX, ROOT, compile_cached

from tracekern.errors import NotBuilt
from tracekern.fabric import library

try:
    LIBRARY = library.require_library() or "libfabric.so.1"
except NotBuilt as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.programs(
    *(f"tests/cpp/{name}.cpp" for name in ("fabric_stress", "fabric_fuzz", "in_process_fabric", "efa_rules"))
)
RACES = ("-O1", "-g1", "-fsanitize=thread", "-DTRACEKERN_CHECKED")
MEMORY = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-DTRACEKERN_CHECKED")
"""Both assert the rule of fabric/rule.hpp."""
# libfabric is not built for the race detector.
WAYS = [
    pytest.param(RACES, "in_process", id="races"),
    *(pytest.param(MEMORY, provider, id=f"memory-{provider}") for provider in ("in_process", "tcp", "efa")),
]
LENGTHS = [pytest.param(3, 25, id="short"), pytest.param(60, 200, id="long", marks=pytest.mark.soak)]
"""Rounds, calls of each thread in a round."""
PLANTED = {
    "two threads at a time": (
        RACES,
        "shared_loop.hpp",
        "if (!lock || !turn_) return false;",
        "if (!turn_) return false;",
    ),
    "an arrival that orders nothing": (
        RACES,
        "imm_counters.hpp",
        "arrived_.fetch_add(1, std::memory_order_seq_cst)",
        "arrived_.fetch_add(1, std::memory_order_relaxed)",
    ),
    "a source that is given back early": (
        MEMORY,
        "revocations.hpp",
        "if (transfers_.is_reading(region) || ",
        "if (",
    ),
    "a destination that is given back early": (
        MEMORY,
        "peers.hpp",
        "|| transfers_.is_writing_to(peer, number)) return false;",
        ") return false;",
    ),
    "an immediate before the bytes of a long write": (
        MEMORY,
        "transfer.hpp",
        "return num_posted == num_before_imms && num_arrived < num_before_imms;",
        "return false;",
    ),
}
"""By fault: the flags that notice it, and where it is: the right text and the wrong one."""
BROKEN_RULES = {
    "an immediate from no memory": (
        "EFA's rules: write: no descriptor",
        "domain.hpp",
        "is_nothing ? nothing_.local : write.local",
        "is_nothing ? nullptr : write.local",
    ),
    "long writes": (
        "EFA's rules: write: .*; a device takes 5000 at once",
        "routing.hpp",
        "bytes > most;",
        "bytes == 1;",
    ),
    "short contexts": ("runtime error|AddressSanitizer", "domain.hpp", "fi_context2 context;", "fi_context context;"),
}
"""By what EFA forbids: what is said of it, and the fault, as above."""


@functools.cache
def program(flags: tuple[str, ...], csrc: Path = CSRC) -> Path:
    return compile_cached((*GXX, *flags), ROOT / "tests" / "cpp" / "fabric_stress.cpp", "", csrc)


@pytest.fixture(autouse=True)
def leaks_of_libfabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps some of what it allocated. Nothing else may."""
    (tmp_path / "leaks").write_text("leak:libfabric.so\n")
    monkeypatch.setenv("LSAN_OPTIONS", f"suppressions={tmp_path / 'leaks'} print_suppressions=0")


def stress(binary: Path, fabric: Path | str, provider: str, *numbers: int) -> subprocess.CompletedProcess[str]:
    return run_program(binary, str(fabric), provider, *map(str, numbers))


def stress_efa(binary: Path, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> subprocess.CompletedProcess[str]:
    variables = rehearsal.variables("efa")
    monkeypatch.setenv("SHIM_LIBRARY", variables["SHIM_LIBRARY"])
    monkeypatch.setenv("EFA_WRITE_BYTES", "5000")  # so that engines have to cut
    return stress(binary, variables["TRACEKERN_LIBFABRIC"], "tcp", *numbers)


def with_fault(copy: Path, name: str, right: str, wrong: str) -> Path:
    shutil.copytree(CSRC, copy)
    file = copy / "fabric" / name
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    return copy


@pytest.mark.parametrize(("rounds", "calls"), LENGTHS)
@pytest.mark.parametrize(("flags", "provider"), WAYS)
def test_engines_do_no_wrong_under_all_calls_at_once(monkeypatch, flags, provider, rounds, calls):
    if provider == "efa":
        assert_right(stress_efa(program(flags), monkeypatch, rounds, calls, 1))
    else:
        fabric = in_process(flags) if provider == "in_process" else LIBRARY
        assert_right(stress(program(flags), fabric, provider, rounds, calls, 1))


@pytest.mark.parametrize("count", [10_000, pytest.param(2_000_000, marks=pytest.mark.soak)])
def test_damaged_messages_and_descriptors_are_read_as_they_are_or_refused(count):
    fuzz = compile_cached((*GXX, *MEMORY), ROOT / "tests" / "cpp" / "fabric_fuzz.cpp", "")
    assert_right(run_program(fuzz, str(count), "1"))


@pytest.mark.soak
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_noticed(tmp_path, fault):
    flags, name, right, wrong = PLANTED[fault]
    copy = with_fault(tmp_path / "csrc", name, right, wrong)
    done = stress(program(flags, copy), in_process(flags), "in_process", 6, 100, 1)
    assert done.returncode in NOTICED, (done.returncode, done.stderr)


@pytest.mark.soak
@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_what_breaks_a_rule_of_efa_is_noticed(tmp_path, monkeypatch, rule):
    said, *fault = BROKEN_RULES[rule]
    done = stress_efa(program(MEMORY, with_fault(tmp_path / "csrc", *fault)), monkeypatch, 2, 20, 1)
    assert done.returncode != 0
    assert re.search(said, done.stderr), done.stderr
