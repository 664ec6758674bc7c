"""The table of device times, which `report` and `info` print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekern.cli.output import console, table

if TYPE_CHECKING:
    from tracekern.analysis.questions.stages import StageTimes


def print_stages(times: StageTimes, of_window: bool = False) -> None:
    """Prints a row a stage and a column a rank; nothing where no kernel is on record from begin to end."""
    from tracekern.viewers.report.stage_grid import about_times, stage_grid

    if not times.stages:
        return
    out = console()
    out.print()
    out.print(about_times(times, of_window), soft_wrap=True)
    shown = stage_grid(times)
    grid = table(list(shown.numbers), list(shown.words))
    for numbers, words in shown.rows:
        grid.add_row(*numbers, *words)
    out.print(grid)
