"""The house rules that a machine can hold: who imports whom, vendor words, sizes, what `import tracekern` pulls in."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tracekern
from tests.paths import ROOT

CSRC = ROOT / "csrc"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

# Module -> our modules that it may import, its own folder included; the longest prefix counts.
FREE = tuple(
    f"tracekern.{name}"
    for name in (
        "errors",
        "files",
        "formatting",
        "environment",
        "garbage",
        "interpreter",
        "host_clock",
        "machine",
        "__version__",
    )
)
"""Free to all. They import only each other."""
_COMPILED = ("tracekern._core", "tracekern._cuda", "tracekern.compiled")
"""Extensions, and the loader of those that most commands do not need."""
ALLOWED_IMPORTS = {
    "tracekern": tuple(
        f"tracekern.{name}" for name in ("record", "comm", "launcher", "timeline", "export", "analysis")
    ),
    **dict.fromkeys(_COMPILED[:2], ()),  # what is imported where there is no extension of that name
    "tracekern.compiled": ("tracekern._core",),
    "tracekern.__main__": ("tracekern.cli.main",),
    **dict.fromkeys(FREE, ()),
    "tracekern.dump": ("tracekern.dump",),
    "tracekern.segment": ("tracekern.segment", "tracekern.dump", *_COMPILED),
    "tracekern.comm": ("tracekern.comm", "tracekern.segment", "tracekern.dump", *_COMPILED),
    "tracekern.comm.network": ("tracekern.comm", "tracekern.fabric.library", *_COMPILED),
    "tracekern.launcher": ("tracekern.launcher", "tracekern.comm", "tracekern.segment"),
    "tracekern.record": ("tracekern.record", "tracekern.comm", "tracekern.segment", "tracekern.dump", *_COMPILED),
    "tracekern.moe": ("tracekern.moe", "tracekern.record", "tracekern.comm", "tracekern.launcher", *_COMPILED),
    "tracekern.fabric": (
        *("tracekern.fabric", "tracekern.record", "tracekern.comm", "tracekern.launcher"),
        *_COMPILED,
    ),
    "tracekern.timeline": ("tracekern.timeline", "tracekern.dump"),
    "tracekern.export": ("tracekern.export", "tracekern.timeline", "tracekern._core"),
    "tracekern.analysis": ("tracekern.analysis", "tracekern.timeline"),
    "tracekern.analysis.graph.longest_path": ("tracekern.analysis", "tracekern.timeline", "tracekern._core"),
    "tracekern.viewers": ("tracekern.viewers", "tracekern.timeline", "tracekern.analysis"),
    "tracekern.gate": ("tracekern.gate", "tracekern.analysis", "tracekern.timeline"),
    "tracekern.gate.pytest_plugin": ("tracekern.gate", "tracekern.analysis", "tracekern.timeline", "tracekern.record"),
    "tracekern.cli": ("tracekern",),
}
FACADE = ("tracekern", *(f"tracekern.{name}" for name in tracekern.__all__))
"""For users alone: through it any folder would reach any other."""
TORCH_ALLOWED = tuple(f"tracekern.{name}" for name in ("comm", "launcher", "record", "moe", "fabric"))

# Folder or file of csrc -> folders and files it may include from.
ALLOWED_INCLUDES = {
    "platform": ("platform",),
    "trace": ("platform", "trace"),
    "comm": ("platform", "trace", "comm"),
    "moe": ("platform", "trace", "comm", "moe"),
    "fabric": ("platform", "trace", "comm", "fabric"),
    "encode": ("encode", "trace/record.h"),
    "apis": ("platform", "trace", "comm", "fabric", "encode", "apis"),
    "moe bindings": ("platform", "trace", "comm", "moe", "apis"),
    "fabric bindings": ("platform", "trace", "comm", "fabric"),
    "python_api.cpp": ("apis",),
    "python_api_cuda.cu": ("apis",),
    "tracekern.h": ("platform", "trace"),
    "tracekern_host.h": (),
    "tracekern_host.cpp": ("platform", "trace", "comm", "tracekern_host.h"),
}
VENDOR_WORDS = re.compile(
    r"\b(__HIP\w*|__CUDA\w*|__NVCC__|__clang__|__GNUC__|__x86_64__|__aarch64__|asm|__asm__|__asm|s_memrealtime"
    r"|__builtin_amdgcn_\w+|__global__|__device__|__shared__|__host__|__syncthreads|__syncwarp|threadIdx|blockIdx|gridDim"
    r"|cuda[A-Z_]\w+|hip[A-Z_]\w+)\b|%globaltimer|<cuda|<hip/"
)

MEMORY_ORDER = re.compile(
    r"\b(load_(acquire|relaxed)_\w+|store_(release|relaxed|fenced)_\w+|fence_release_\w+|add_acq_rel_\w+|claim_system|mutated)\("
)
"""What decides in which order other warps and ranks see stores, and what leaves that out for a test."""


def python_files() -> list[Path]:
    return [path for package in ("tracekern", "viewers") for path in sorted((ROOT / package).rglob("*.py"))]


def cxx_files() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".hpp", ".cpp", ".cu", ".cuh"})


def all_sources() -> list[Path]:
    folders = [ROOT / name for name in ("tests", "benchmarks", "examples")]
    others = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in {".py", ".cpp", ".h"}]
    return [*python_files(), *cxx_files(), *others, ROOT / "setup.py"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "viewers":
        parts.insert(0, "tracekern")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of everything that a file imports, inside functions too."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # the module in `from tracekern import _core` is the name
                yield f"{module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((str(name.value), node.lineno) for name in node.args[:1] if isinstance(name, ast.Constant))


def is_within(module: str, parents: tuple[str, ...]) -> bool:
    return any(module == parent or module.startswith(parent + ".") for parent in parents)


def import_faults(path: Path) -> list[str]:
    module = module_name(path)
    rule = max((prefix for prefix in ALLOWED_IMPORTS if is_within(module, (prefix,))), key=len)
    assert rule != "tracekern" or module == rule, f"{module}: no row of the table; wanted one for its package"
    allowed = (*FREE, *ALLOWED_IMPORTS[rule])
    faults = []
    for name, line in imports(path):
        is_ours = is_within(name, ("tracekern",))
        is_torch = is_within(name, ("torch",)) and not is_within(module, TORCH_ALLOWED)
        if is_torch or name in FACADE or (is_ours and not is_within(name, allowed)):
            faults.append(f"{relative(path)}:{line}: imports {name}")
    return faults


def test_imports_follow_the_table():
    assert [fault for path in python_files() for fault in import_faults(path)] == []


def test_the_import_check_finds_planted_faults(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    planted = tmp_path / "tracekern" / "timeline" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text(
        "from tracekern.dump.format import WIDE\n"
        "from tracekern.timeline import model\n"
        "def lazily():\n"
        "    import torch\n"
        "    from ..record import session\n"
        "    from tracekern import _core\n"
        "    import tracekern\n"
        "    from tracekern import load\n"
    )
    found = [fault.split()[-1] for fault in import_faults(planted)]
    assert found == ["torch", "tracekern.record.session", "tracekern._core", "tracekern", "tracekern.load"]


def test_no_modules_import_each_other():
    """Neither at the top, nor inside functions, nor for types. The facade reaches everything, and is left out."""
    paths = {module_name(path): path for path in python_files() if module_name(path) != "tracekern"}
    graph = {
        module: {name if name in paths else name.rpartition(".")[0] for name, _ in imports(path)}
        & paths.keys() - {module}
        for module, path in paths.items()
    }
    TopologicalSorter(graph).prepare()  # its CycleError names the modules
    (imported, *_) = graph["tracekern.moe.workload.run"]
    with pytest.raises(CycleError):
        TopologicalSorter({**graph, imported: {"tracekern.moe.workload.run"}}).prepare()


def test_commands_import_heavy_things_inside():
    """Workloads are themselves imported when `run` calls them."""
    light = (*sys.stdlib_module_names, "typer", "rich", "tracekern.cli", "tracekern.errors", "tracekern.formatting")
    found = [
        f"{relative(path)}:{node.lineno}: imports {name}"
        for path in sorted((ROOT / "tracekern" / "cli").rglob("*.py"))
        if not path.name.startswith("run_")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if not is_within(name, light) and name != "tracekern"
    ]
    assert found == []


def test_import_tracekern_is_light():
    code = (
        "import sys, tracekern; dir(tracekern); "
        "print(sorted({'torch', 'tracekern._core', 'polars', 'pyarrow', 'typer', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def without_comments(text: str) -> str:
    """C++ text with comments blanked and line numbers kept."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else "\n" * match[0].count("\n")

    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.DOTALL)


def csrc_part(path: Path) -> str:
    """The row of ALLOWED_INCLUDES for a file. Bindings of a family are files of their own beside its kernels."""
    part = path.relative_to(CSRC).parts[0]
    return f"{part} bindings" if part in ("moe", "fabric") and path.name.startswith("bind") else part


def includes(path: Path) -> Iterator[tuple[str, str, str]]:
    """(file:line, `"` or `<`, name) of every #include of a file."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.match(r'\s*#\s*include\s+(["<])([^">]+)', line):
            yield f"{relative(path)}:{number}", match[1], match[2]


def test_csrc_includes_only_to_the_left():
    assert [fault for path in cxx_files() for fault in include_faults(path)] == []


def include_faults(path: Path) -> Iterator[str]:
    allowed = ALLOWED_INCLUDES[csrc_part(path)]
    for where, quote, name in includes(path):
        if quote == "<":
            continue
        if not (CSRC / name).exists():
            yield f"{where}: includes {name}; wanted a path that starts in csrc"
        elif name not in allowed and name.split("/")[0] not in allowed:
            yield f"{where}: includes {name}; allowed: {allowed}"
        elif name.startswith("moe/") and name.count("/") >= 2 and CSRC / "moe" / name.split("/")[1] not in path.parents:
            yield f"{where}: includes {name}; families do not know each other"


KEPT_FOR_COMPARISON = re.compile(r'#\s*include\s+"(moe/\w+/(?:worklog|contract)/[^"]+)"')


def test_kernels_of_the_product_know_none_that_are_kept_for_comparison():
    """Only the list of a family's kernels has both."""
    product = [path for path in cxx_files() if not {"worklog", "contract"} & set(path.parts)]
    users = {relative(path) for path in product if KEPT_FOR_COMPARISON.search(path.read_text())}
    assert users == {"csrc/moe/p2p/kernels.h", "csrc/moe/gemm/kernels.h"}


def test_csrc_knows_no_torch_and_pybind_only_in_apis():
    with_pybind = {"apis", "moe bindings", "fabric bindings", "python_api.cpp", "python_api_cuda.cu"}
    found = [
        f"{where}: includes {name}"
        for path in cxx_files()
        for where, _, name in includes(path)
        if name.startswith(("torch/", "ATen/", "c10/"))
        or (name.startswith(("pybind11/", "Python.h")) and csrc_part(path) not in with_pybind)
    ]
    assert found == []


def test_the_include_check_finds_planted_faults(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "CSRC", tmp_path / "csrc")
    planted = tmp_path / "csrc" / "trace" / "planted.h"
    planted.parent.mkdir(parents=True)
    (tmp_path / "csrc" / "comm").mkdir()
    (tmp_path / "csrc" / "comm" / "signal.h").write_text("")
    planted.write_text('#include <vector>\n#include "comm/signal.h"\n#include "planted.h"\n')
    found = [fault.split(";")[0] for fault in include_faults(planted)]
    assert found == [
        "csrc/trace/planted.h:2: includes comm/signal.h",
        "csrc/trace/planted.h:3: includes planted.h",
    ]


def words_outside(parts: set[str], words: re.Pattern[str]) -> list[str]:
    """Where `words` stand in csrc outside these parts of it."""
    return [
        f"{relative(path)}:{number}: {match[0]}"
        for path in cxx_files()
        if csrc_part(path) not in parts
        for number, line in enumerate(without_comments(path.read_text()).splitlines(), 1)
        for match in words.finditer(line)
    ]


def test_vendor_words_stand_in_platform_alone():
    assert words_outside({"platform"}, VENDOR_WORDS) == []


def test_kernels_leave_memory_order_to_comm():
    assert words_outside({"platform", "trace", "comm"}, MEMORY_ORDER) == []


def test_the_segment_alone_writes_its_header():
    written = re.compile(r"""header\[[^]]+\] *[-+|]?=[^=]""")
    found = {relative(path) for path in python_files() if written.search(path.read_text())}
    assert {name for name in found if not name.startswith("tracekern/segment/")} == set()
    assert "tracekern/segment/writer.py" in found


def test_files_are_short():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in all_sources()}
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_FILE_LINES} == {}


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def cxx_functions(text: str) -> Iterator[tuple[str, int]]:
    """(header, lines) of every function body at namespace or class scope.

    A brace counter: a brace opens a function when a parameter list stands before it and no scope keyword leads.
    """
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', without_comments(text))
    text = re.sub(r"'(?:\\.|[^'\\\n])'", "' '", text)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda match: "\n" * match[0].count("\n"), text, flags=re.MULTILINE)
    scope = re.compile(r"\s*(template\s*<.*>\s*)?(inline\s+)?(namespace|struct|class|union|enum|extern)\b", re.DOTALL)
    depth, line, start_line, before, name = 0, 1, 0, 0, ""
    for mark in re.finditer("[{};]", text):
        header = text[before : mark.start()]
        before = mark.end()
        line += header.count("\n")
        if mark[0] == "{":
            if depth == 0 and "(" in header and not scope.match(header) and not header.rstrip().endswith("="):
                depth, name, start_line = 1, " ".join(header.split()), line - header.lstrip().count("\n")
            elif depth:
                depth += 1
        elif mark[0] == "}" and depth:
            depth -= 1
            if depth == 0:
                yield name, line - start_line + 1


def test_functions_are_short():
    found = [
        f"{relative(path)}: {name}: {lines} lines"
        for path in all_sources()
        for name, lines in (python_functions if path.suffix == ".py" else cxx_functions)(path.read_text())
        if lines >= MAX_FUNCTION_LINES
    ]
    assert found == []


def test_the_cxx_function_counter_counts():
    text = (
        "namespace a {\n"
        "struct alignas(16) B { int x = 1; };\n"
        "template <class T, int N>\n"
        "void first(const T& argument,\n"
        "           int other) {  // } not a brace\n"
        "    for (int i = 0; i < N; ++i) {\n"
        "        call([&] { return '}'; });\n"
        "    }\n"
        "}\n"
        "#define MACRO(x) \\\n"
        "    if (x) {\n"
        'int second() { return size("}"); }\n'
        "}  // namespace a\n"
    )
    assert [lines for _, lines in cxx_functions(text)] == [7, 1]


def test_nothing_names_a_path_of_a_machine():
    pattern = re.compile("/" + r"(work|home|root|Users|tmp/tk)/\w+")
    texts = [*all_sources(), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    found = [f"{relative(path)}: {match[0]}" for path in texts for match in pattern.finditer(path.read_text())]
    assert found == []
