"""How long does each kernel take on each rank, and how much of that is nobody's work?"""

from __future__ import annotations

from tracekern.analysis.findings import Findings
from tracekern.formatting import duration, escape, factor, sentence
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.question import Question
from tracekern.viewers.report.stage_grid import StageGrid, about_times, describe_idle, stage_grid

_ASIDE = (
    "A kernel that waits for a late rank takes long and is not slow: the second table says for how much of its time all"
    " warps waited, had not begun, or had ended. A warp that records nothing does not count as working. <i>All of an "
    "iteration</i> is the sum of its kernels."
)


def draw(findings: Findings) -> Answer:
    times = findings.stages
    if not times.stages:
        return Answer("No kernel is on record from begin to end.")
    text = escape(sentence(describe_idle(times)))
    if len(times.ranks) > 1:
        worst = max(times.stages, key=lambda row: (row.imbalance - 1) * row.mean_ns)
        text = (
            f"The slowest rank exceeds the mean most in <b>{escape(worst.stage)}</b>: "
            f"<b>{factor(worst.imbalance)}</b> {duration(worst.mean_ns)}. {text}"
        )
    body = [
        f"<p class='aside'>{escape(sentence(about_times(times, findings.window is not None)))}</p>",
        _table(stage_grid(times)),
    ]
    if (idle := stage_grid(times, idle=True)).rows:
        body += ["<h3>For how much of that no warp works</h3>", _table(idle)]
    return Answer(text, body, _ASIDE)


QUESTION = Question("stages", "Stages", "How long does each kernel take on each rank?", draw, order=25)


def _table(grid: StageGrid) -> str:
    rows = [[*map(escape, words), *numbers] for numbers, words in grid.rows]
    return table([*grid.words, *grid.numbers], rows, numbers=len(grid.numbers))
