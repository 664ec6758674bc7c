"""Do ranks wait for their own node or for others?"""

from __future__ import annotations

from tracekern.analysis.findings import Findings
from tracekern.analysis.questions.nodes import NodeWaits
from tracekern.formatting import count, duration, escape, number_ranges, percent, sentence
from tracekern.viewers.report.charts import heatmap, shorten
from tracekern.viewers.report.frame import Answer, Figure, table
from tracekern.viewers.report.question import Question

NUMBERS = ("waits", "sum", "of all", "late", "late, likely between")
WORDS = ("node", "waits for")
"""Heads of the columns of pair_rows()."""
_MAX_PAIRS = 8
_MAX_NAME = 18
_ASIDE = (
    "Each row is a node whose ranks wait, each column the node of the rank waited for. A cell sums the waits of all "
    "warps, colours are logarithmic. On the diagonal ranks wait for others of their node. Waits of a rank for its own "
    "warps are left out. <i>NAME#0</i> and <i>NAME#1</i> are two machines with one name, <i>NAME/0</i> and "
    "<i>NAME/1</i> parts of one machine that the settings of the run call nodes."
)


def draw(findings: Findings) -> Answer | None:
    found = findings.nodes
    if found is None:
        return None
    answer = escape(sentence(describe_nodes(found)))
    rows = [[*map(escape, (*words, *numbers))] for numbers, words in pair_rows(found)]
    of_nodes = [
        [escape(node), escape(number_ranges([*own])), duration(unknown) if unknown else "-"]
        for node, own, unknown in zip(found.nodes, found.ranks, found.unknown_ns.tolist(), strict=True)
    ]
    body: list[str | Figure] = [
        *([_picture(found)] if rows else []),
        f"<h3>{escape(about_pairs(found).capitalize())}</h3>",
        table([*WORDS, *NUMBERS], rows, numbers=len(NUMBERS)),
        "<h3>Ranks of each node</h3>",
        table(["node", "ranks", "waits for unknown ranks"], of_nodes, numbers=1),
    ]
    return Answer(answer, body, _ASIDE)


QUESTION = Question("nodes", "Nodes", "Do ranks wait for their own node or for others?", draw, order=31)


def describe_nodes(found: NodeWaits) -> str:
    """Says how much of the waiting is for other nodes, and between which two it is most."""
    total, unknown = int(found.wait_ns.sum()), int(found.unknown_ns.sum())
    parts = ["no wait for another rank is on record"]
    if total:
        parts = [f"{percent(found.across_ns, total)} of {duration(total)} of waits between ranks are between nodes"]
    if across := next((pair for pair in found.pairs() if pair[0] != pair[1]), None):
        node, peer = (found.nodes[idx] for idx in across)
        parts.append(f"{node} waits longest for {peer}: {duration(int(found.wait_ns[across]))}")
    if unknown:
        waits = count(int(found.unknown_count.sum()), "wait")
        parts.append(f"not counted: {waits} for unknown ranks, {duration(unknown)}")
    return "; ".join(parts)


def about_pairs(found: NodeWaits) -> str:
    """Returns what pair_rows() lists."""
    pairs = len(found.pairs())
    return "waits by pair of nodes" + (f", the longest {_MAX_PAIRS} sums of {pairs:,}" if pairs > _MAX_PAIRS else "")


def pair_rows(found: NodeWaits) -> list[tuple[list[str], list[str]]]:
    """Numbers and words of each pair of nodes, the longest sum first."""
    total = int(found.wait_ns.sum())
    return [
        (
            [
                f"{found.count[pair]:,}",
                duration(int(found.wait_ns[pair])),
                percent(int(found.wait_ns[pair]), total),
                duration(int(found.late_ns[pair])),
                f"{duration(int(found.late_lo_ns[pair]))} – {duration(int(found.late_hi_ns[pair]))}",
            ],
            [found.nodes[pair[0]], found.nodes[pair[1]]],
        )
        for pair in found.pairs()[:_MAX_PAIRS]
    ]


def _picture(found: NodeWaits) -> Figure:
    hover = [
        [
            f"{escape(node)} waits for {escape(peer)}<br>{duration(sum_ns)} in {count(number, 'wait')}"
            if number
            else ""
            for peer, sum_ns, number in zip(found.nodes, *line, strict=True)
        ]
        for node, *line in zip(found.nodes, found.wait_ns.tolist(), found.count.tolist(), strict=True)
    ]
    short = [node.partition(".")[0] for node in found.nodes]
    names = [escape(shorten(name, _MAX_NAME)) for name in (short if len({*short}) == len(short) else found.nodes)]
    says = "Wait time between nodes: rows wait, columns are waited for"
    return heatmap(names, found.wait_ns.tolist(), hover, [], says, axes=("waits (node)", "is waited for (node)"))
