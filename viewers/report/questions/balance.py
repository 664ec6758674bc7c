"""Is the load even? Busy time by rank, tokens by expert, links, and how much communication hides behind compute."""

from __future__ import annotations

import math
from typing import Any

from tracekern.analysis.findings import Findings
from tracekern.analysis.questions.balance import Balance, WorkLoad, load_imbalance, most_uneven
from tracekern.formatting import count, duration, escape, percent, three_digits
from tracekern.viewers.report.charts import heatmap, stacked_bars, time_scale
from tracekern.viewers.report.frame import Answer, Figure, table
from tracekern.viewers.report.question import Question

_MAX_EXPERTS = 512
_MAX_PHASES = 5
_UNEVEN = 1.25
"""A block is told of that works so many times as long as the mean of its rank."""


def draw(findings: Findings) -> Answer:
    balance = findings.balance
    if not any(load.busy_ns for load in balance.ranks):
        return Answer("No warp left work on record.")
    body: list[str | Figure] = []
    if len(balance.ranks) > 1:
        body.append(_rank_bars(balance.ranks))
    if findings.imbalances:
        body += ["<h3>Phases of work that one rank spends longest on</h3>", _imbalance_table(findings)]
    if len({load.name for load in balance.roles}) > 1:
        body += ["<h3>What warps do, by role</h3>", _role_table(balance.roles)]
    if len(balance.experts) > 1:
        body += ["<h3>Experts</h3>", _expert_bars(balance.experts)]
        if (rest := len(balance.experts) - _MAX_EXPERTS) > 0:
            body.append(f"<p class='aside'>and {count(rest, 'more expert')}; these are the busiest</p>")
    if any(link.tokens or link.gb_per_s for link in balance.links):
        body += ["<h3>Links</h3>", *_links(findings)]
    return Answer(_answer(findings), body, _aside(findings))


QUESTION = Question("balance", "Balance", "Is the load even?", draw, order=70)


def _answer(findings: Findings) -> str:
    balance = findings.balance
    factor, busiest = most_uneven(balance.ranks, balance.joined)
    of_group = " of its group" if len(balance.joined) > 1 else ""
    parts = [
        f"The busiest rank, <b>rank {busiest.rank}</b>, works <b>{factor:.2f} x</b> as long as the mean{of_group}"
        if len(balance.ranks) > 1
        else f"Rank {busiest.rank} works {duration(busiest.busy_ns)} over all its warps"
    ]
    parts += _busiest_block(balance)
    received = [load for load in balance.experts if load.tokens_received]
    if received and balance.num_experts > 1:
        most = max(received, key=lambda load: load.tokens_received)
        mean = sum(load.tokens_received for load in balance.experts) / balance.num_experts
        parts.append(
            f"expert {escape(most.name)} on rank {most.rank} gets {most.tokens_received:,} tokens, "
            f"{most.tokens_received / mean:.1f} x the mean"
        )
    return "; ".join(parts) + "."


def _busiest_block(balance: Balance) -> list[str]:
    """On the rank where blocks differ most: a kernel lasts as long as its busiest block."""
    of_ranks = [tuple(load for load in balance.blocks if load.rank == rank.rank) for rank in balance.ranks]
    factor, loads = max(
        ((load_imbalance(loads), loads) for loads in of_ranks if any(load.busy_ns for load in loads)),
        key=lambda entry: entry[0],
    )
    if factor < _UNEVEN:
        return []
    busiest = max(loads, key=lambda load: load.busy_ns)
    return [
        f"on rank {busiest.rank} block {escape(busiest.name)} works {factor:.2f} x as long as the mean of its blocks"
    ]


def _aside(findings: Findings) -> str:
    shares = [overlap.share for overlap in findings.balance.overlaps if not math.isnan(overlap.share)]
    hidden = f" Expert compute hides {percent(sum(shares), len(shares))} of the communication." if any(shares) else ""
    return "Busy is time in spans that are not waits, over all warps; a span inside another counts once." + hidden


def _rank_bars(loads: tuple[WorkLoad, ...]) -> Figure:
    unit, size = time_scale([load.busy_ns for load in loads])
    parts = [("busy", "--work", "", [load.busy_ns / size for load in loads])]
    hover = [
        [
            f"rank {load.rank}: busy {duration(load.busy_ns)}, waiting {duration(load.wait_ns)}<br>"
            f"{load.tokens_sent:,} tokens sent, {load.tokens_received:,} received"
            for load in loads
        ]
    ]
    rows = [f"rank {load.rank}" for load in loads]
    return stacked_bars(rows, parts, axis=f"{unit} busy, over all warps", says="Busy time by rank", hover=hover)


def _role_table(roles: tuple[WorkLoad, ...]) -> str:
    """Over all ranks: which warps are short of work, and which hold the others up."""
    rows = []
    for name in dict.fromkeys(load.name for load in roles):
        busy, waiting = (
            sum(getattr(load, field) for load in roles if load.name == name) for field in ("busy_ns", "wait_ns")
        )
        rows.append([escape(name or "other"), duration(busy), duration(waiting), percent(waiting, busy + waiting)])
    return table(["role", "busy", "waiting", ""], rows, numbers=3)


def _imbalance_table(findings: Findings) -> str:
    rows = [
        [
            f"<code>{escape(entry.phase)}</code>",
            f"rank {entry.busiest_rank}",
            duration(entry.max_ns),
            duration(entry.mean_ns),
            f"{entry.max_ns / entry.mean_ns:.2f} x" if entry.mean_ns else "-",
        ]
        for entry in findings.imbalances[:_MAX_PHASES]
    ]
    return table(["phase", "longest on", "there", "mean", ""], rows, numbers=3)


def _expert_bars(experts: tuple[WorkLoad, ...]) -> Figure:
    """One bar an expert, in their order, of the busiest if there are many; the ranks alternate in shade."""
    busiest = sorted(experts, key=lambda load: (-load.tokens_received, -load.busy_ns))[:_MAX_EXPERTS]
    shown = sorted(busiest, key=lambda load: (load.rank, int(load.name)))
    by_tokens = any(load.tokens_received for load in shown)
    unit, size = ("tokens received", 1.0) if by_tokens else time_scale([load.busy_ns for load in shown])
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "x": list(range(len(shown))),
            "y": [(load.tokens_received if by_tokens else load.busy_ns) / size for load in shown],
            "marker": {"color": ["--work" if load.rank % 2 == 0 else "--host" for load in shown], "line": {"width": 0}},
            "hovertext": [
                f"expert {escape(load.name)} on rank {load.rank}<br>{count(load.tokens_received, 'token')} received, "
                f"busy {duration(load.busy_ns)}"
                for load in shown
            ],
            "hoverinfo": "text",
        }
    ]
    first_of_rank = [place for place, load in enumerate(shown) if place == 0 or shown[place - 1].rank != load.rank]
    named = first_of_rank[:: 1 if len(first_of_rank) <= 12 else 8]
    layout = {
        "bargap": 0.15,
        "xaxis": {
            "tickvals": named,
            "ticktext": [f"rank {shown[place].rank}" for place in named],
            "showgrid": False,
            "zeroline": False,
            "ticklabeloverflow": "allow",  # else Plotly may hide the only one, and seek the title's place below it
            "title": {"text": "experts of each rank, in their order"},
        },
        "yaxis": {"title": {"text": unit if by_tokens else f"busy, {unit}"}},
        "showlegend": False,
        "margin": {"b": 48},
        "narrow": {"xaxis": {"ticktext": [str(shown[place].rank) for place in named]}},
    }
    return Figure(data, layout, 260, "Load of each expert")


def _links(findings: Findings) -> list[str | Figure]:
    balance = findings.balance
    here = {rank.rank for rank in findings.timeline.ranks}
    ranks = sorted(here | {link.destination for link in balance.links})
    place = {rank: idx for idx, rank in enumerate(ranks)}
    rates = [[0.0] * len(ranks) for _ in ranks]
    hover = [[""] * len(ranks) for _ in ranks]
    with_rate = any(link.gb_per_s for link in balance.links)
    for link in balance.links:
        row, column = place[link.source], place[link.destination]
        rates[row][column] = (link.gb_per_s or 0.0) if with_rate else float(link.tokens)
        speed = f"{_gb_per_s(link.gb_per_s)} GB/s" if link.gb_per_s else "speed unknown"
        part = "" if link.utilisation is None else f", {100 * link.utilisation:.0f} % of the measured limit"
        hover[row][column] = (
            f"rank {link.source} → rank {link.destination}<br>{count(link.tokens, 'token')}, {speed}{part}<br>"
            f"sending for {duration(link.busy_ns)}"
        )
    what = "GB/s while sending" if with_rate else "tokens sent"
    figure = heatmap(
        [str(rank) for rank in ranks],
        rates,
        hover,
        (),
        f"{what}: rows send, columns receive",
        axes=("sends (rank)", "receives (rank)"),
        say=_gb_per_s if with_rate else "{:,.0f}".format,
    )
    used = [link for link in balance.links if link.utilisation is not None]
    best = max(used, key=lambda link: link.utilisation or 0.0, default=None)
    if best is not None:
        limits = f"the measured limit of {best.limit_gb_per_s:.4g} GB/s"
        share = percent(best.utilisation or 0.0, 1.0)
        what += f"; at best {share} of {limits}, from rank {best.source} to rank {best.destination}"
    elif with_rate:
        what += "; give the limit that a link was measured to have with --link-limit"
    return [f"<p class='aside'>{what}</p>", figure]


def _gb_per_s(value: float) -> str:
    return three_digits(value) if value >= 1 else f"{value:.3g}"
