"""What came from where? Tokens of each (local expert, source rank) pair, the wait for their count, and the copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tracekern.analysis.findings import Findings
from tracekern.analysis.questions.receive_matrix import ReceiveMatrix
from tracekern.formatting import count, duration, escape, factor, percent, ranks, sentence
from tracekern.timeline.model import Int64
from tracekern.viewers.report.charts import MAX_FULL_ROWS, heatmap
from tracekern.viewers.report.frame import Answer, Choice, Figure, table
from tracekern.viewers.report.question import Question

_MAX_CELLS = 1 << 14
_ASIDE = (
    "Each row is a local expert of a receiving rank, each column a rank that sends; a line parts the ranks. Tokens are "
    "those that the counts announced. A count is waited for by one warp, the poller of its pair, so that waits of "
    "different pairs overlap. Copies are summed over warps. Colours of durations are logarithmic. The largest cell is "
    "framed."
)


def draw(findings: Findings) -> Answer | None:
    matrix = findings.received
    if matrix is None:
        return None
    shown = _drawn_ranks(matrix)
    choice = Choice(
        [
            ("tokens", _picture(shown, shown.tokens, "Tokens received", is_time=False)),
            ("wait for the count", _picture(shown, shown.wait_ns, "Wait for the count", is_time=True)),
            ("copies", _picture(shown, shown.copy_ns, "Time in copies", is_time=True)),
        ]
    )
    left_out = sorted(set(matrix.rank.tolist()) - set(shown.rank.tolist()))
    aside = f"{_ASIDE} {escape(sentence(f'{ranks(left_out)} not drawn'))}" if left_out else _ASIDE
    body = (choice, "<h3>What each rank received</h3>", _rank_table(matrix))
    return Answer(escape(sentence(describe_received(matrix, findings.balance.joined))), body, aside)


QUESTION = Question("receive", "Receive", "What came from where?", draw, order=75)


def describe_received(matrix: ReceiveMatrix, joined: Sequence[tuple[int, ...]]) -> str:
    """Says how many tokens came, for which expert most, which source was waited for most, and what copies took.

    joined: the ranks that kernels join, see joined_ranks().
    """
    rank, local_expert = matrix.rows
    by_expert = matrix.grid(matrix.tokens).sum(axis=1)
    tokens, most = int(by_expert.sum()), int(by_expert.argmax())
    parts = [f"{count(tokens, 'token')} came for {count(len(rank), 'expert')}"]
    if tokens and len(rank) > 1:
        beside = by_expert[np.isin(rank, next(ranks for ranks in joined if rank[most] in ranks))]
        of_group = " of its group" if len(joined) > 1 else ""
        parts.append(
            f"local expert {local_expert[most]} of rank {rank[most]} got most: {by_expert[most]:,}, "
            f"{factor(by_expert[most] / beside.mean())} the mean{of_group}"
        )
    by_source = matrix.grid(matrix.wait_ns).sum(axis=0)
    waited, latest = int(by_source.sum()), int(by_source.argmax())
    text = f"warps waited {duration(waited)} for the counts"
    if waited and len(by_source) > 1:
        text += f", {percent(by_source[latest], waited)} of it for those of rank {matrix.sources[latest]}"
    parts.append(text)
    if matrix.copies.any():
        parts.append(f"copies took {duration(matrix.copy_ns.sum())}")
    return "; ".join(parts)


def _drawn_ranks(matrix: ReceiveMatrix) -> ReceiveMatrix:
    """Returns the pairs of as many whole ranks as can be drawn: of the one whose expert got most, and of the first."""
    rank, _ = matrix.rows
    most = rank[matrix.grid(matrix.tokens).sum(axis=1).argmax()]
    receivers, num_rows = np.unique(rank, return_counts=True)
    order = np.argsort(receivers != most, kind="stable")
    fits = np.cumsum(num_rows[order]) <= _MAX_CELLS // len(matrix.sources)
    fits[0] = True
    return matrix.take(np.isin(matrix.rank, receivers[order][fits]))


def _picture(matrix: ReceiveMatrix, values: Int64, what: str, *, is_time: bool) -> Figure:
    rank, local_expert = matrix.rows
    cells = matrix.grid(values)
    names = [f"{rank} · {expert}" for rank, expert in zip(rank.tolist(), local_expert.tolist(), strict=True)]
    top, left = (int(place) for place in np.unravel_index(cells.argmax(), cells.shape))
    figure = heatmap(
        names,
        cells.tolist(),
        _hover(matrix),
        [(top, left, top, left)] if cells.any() else [],
        f"{what}: rows are experts that receive, columns are ranks that send",
        columns=[str(source) for source in matrix.sources.tolist()],
        axes=("receives (rank · local expert)", "sends (rank)"),
        say=None if is_time else "{:,.0f}".format,
    )
    first = np.flatnonzero(np.diff(rank, prepend=-1))
    layout = {**figure.layout, "shapes": [*figure.layout["shapes"], *_lines(first[1:], cells.shape[1])]}
    if len(names) > MAX_FULL_ROWS:
        named = first[:: 1 if len(first) <= 16 else 4]
        ticks = {"tickvals": named.tolist(), "ticktext": [f"rank {rank[place]}" for place in named.tolist()]}
        title = {"text": "receives (rank, its local experts in their order)"}
        layout["yaxis"] = {**layout["yaxis"], **ticks, "title": title}
    return replace(figure, layout=layout)


def _hover(matrix: ReceiveMatrix) -> list[list[str]]:
    rank, local_expert = (column.tolist() for column in matrix.rows)
    columns = (matrix.tokens, matrix.waits, matrix.wait_ns, matrix.copy_ns)
    grids = np.stack([matrix.grid(column) for column in columns], axis=-1).tolist()
    return [
        [
            f"rank {rank[row]}, local expert {local_expert[row]}, from rank {source}<br>"
            f"{count(tokens, 'token')}, waited {duration(wait_ns)} in {count(waits, 'call')}<br>"
            f"copies took {duration(copy_ns)}"
            for source, (tokens, waits, wait_ns, copy_ns) in zip(matrix.sources.tolist(), line, strict=True)
        ]
        for row, line in enumerate(grids)
    ]


def _lines(rows: Int64, num_columns: int) -> list[dict[str, object]]:
    """A line above each of these rows."""
    return [
        {
            "type": "line",
            "x0": -0.5,
            "x1": num_columns - 0.5,
            "y0": row - 0.5,
            "y1": row - 0.5,
            "line": {"color": "--soft", "width": 1},
        }
        for row in rows.tolist()
    ]


def _rank_table(matrix: ReceiveMatrix) -> str:
    rows = []
    for rank in np.unique(matrix.rank).tolist():
        own = matrix.of_rank(rank)
        by_source = own.grid(own.wait_ns).sum(axis=0)
        latest = int(by_source.argmax())
        waited = int(by_source.sum())
        rows.append(
            [
                f"rank {rank}",
                f"{own.tokens.sum():,}",
                duration(waited),
                f"rank {own.sources[latest]}, {percent(by_source[latest], waited)}" if waited else "-",
                duration(own.copy_ns.sum()),
            ]
        )
    return table(["", "tokens", "waits for counts", "most for those of", "copies"], rows, numbers=4)
