"""docs/cookbook.md does what it says: its Python runs, block after block, and its commands exist."""

from __future__ import annotations

import re

from tests.paths import ROOT
from tracekern.cli.app import app

PAGE = (ROOT / "docs" / "cookbook.md").read_text("utf-8")


def test_its_python_runs(tmp_path, monkeypatch):
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 8
    exec(compile("\n".join(blocks), "docs/cookbook.md", "exec"), {"__name__": "cookbook"})


def test_its_commands_exist():
    import typer

    group = typer.main.get_command(app)
    for line in re.findall(r"(?:^ {4}|`)tracekern ([^`\n]+)", PAGE, re.MULTILINE):
        command, *words = line.split()
        options = {name for parameter in group.commands[command].params for name in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, line
