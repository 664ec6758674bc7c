"""What commands print to a terminal and to a pipe (tracekern/cli/output.py)."""

from __future__ import annotations

import dataclasses

import pytest
from timelines import EVENTS, make_rank, make_timeline

from tracekern.analysis.questions.summary import summarize
from tracekern.cli.commands.info import print_summary
from tracekern.cli.output import console, note, table
from tracekern.formatting import escape


def test_names_are_printed_as_they_are(capsys):
    names = ["copy [/]", "signal[red]", "wait:warning:"]
    events = tuple(dataclasses.replace(event, name=name) for event, name in zip(EVENTS, names, strict=False))
    ranks = (make_rank(0, device="H200 [1g.18gb]"), make_rank(1, node="node[/bold]"))
    print_summary(summarize(make_timeline(events=(*events, *EVENTS[3:]), ranks=ranks)))
    note("x:warning:.pftrace")
    printed = capsys.readouterr()
    for text in (*names, "H200 [1g.18gb]", "node[/bold]"):
        assert text in printed.out
    assert printed.err == "x:warning:.pftrace\n"


def test_names_steer_no_terminal(capsys):
    name, shown = "a\x1b[31m\n\u202eb\u0085 é", r"a\x1b[31m\n\u202eb\x85 é"
    grid = table([], ["event"])
    grid.add_row(name)
    console().print(grid)
    console().print(name)
    note(name)
    assert capsys.readouterr() == (f"event\n{shown}\n{shown}\n", f"{shown}\n")
    assert escape(f"<{name}>") == f"&lt;{shown}&gt;"


@pytest.mark.parametrize("colour", [False, True])
def test_no_line_of_a_table_ends_in_spaces(capsys, monkeypatch, colour):
    if colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
    grid = table(["rank"], ["state", "clock"])
    grid.add_row("0", "closed", "ping-pong")
    grid.add_row("1", "salvaged", "")
    console().print(grid)
    printed = capsys.readouterr().out
    assert ("\x1b[1m" in printed) == colour
    assert printed.replace("\x1b[1m", "").replace("\x1b[0m", "") == (
        "rank  state     clock\n   0  closed    ping-pong\n   1  salvaged\n"
    )
