"""How much of staging hides under the multiplication? Of sweeps and rings that are on record step by step."""

from __future__ import annotations

from tracekern.analysis.findings import Findings
from tracekern.analysis.groups import group_rows
from tracekern.analysis.questions.ring_steps import RingSteps
from tracekern.analysis.questions.staging import Staging
from tracekern.formatting import count, duration, escape, percent, sentence
from tracekern.viewers.report.charts import heatmap
from tracekern.viewers.report.frame import Answer, Choice, Figure, table
from tracekern.viewers.report.question import Question

_MAX_ROWS = 1024
_ASIDE = (
    "Exposed is the time in which a warp stages, parks or decodes and multiplies nothing; hidden is multiplication "
    "while a later group of channels was staged already. Each row is an expert of a rank, each column a warp of the "
    "block; what is left of a sweep is the cost of the records. Of tiles alone that were recorded in detail."
)


_RING_ASIDE = (
    "Of a ring one warp copies weights and x ahead of others, which multiply them. Shares are of the consumers' tiles "
    "and, for the producer, of its own two steps. Decoding is a part of multiply_stage, estimated from one decoding of "
    "each stage. Only tiles recorded in detail count; records take time, too, which makes what is short look longer."
)


def draw(findings: Findings) -> Answer | None:
    staging, rings = findings.staging, findings.ring_steps
    told: list[str] = []
    shown: list[str | Choice] = []
    asides: list[str] = []
    if staging is not None:
        told.append(describe_staging(staging))
        shown.append(Choice([(kernel, _picture(staging.of_kernel(kernel), kernel)) for kernel in staging.kernels]))
        shown.append(_table(staging))
        asides.append(_ASIDE)
    if rings is not None:
        told.append(describe_rings(rings))
        shown.append(_ring_table(rings))
        asides.append(_RING_ASIDE)
    if not told:
        return None
    return Answer(escape(sentence("; ".join(told))), tuple(shown), " ".join(asides))


QUESTION = Question("staging", "Staging", "How much of staging hides under the multiplication?", draw, order=77)


def describe_staging(staging: Staging) -> str:
    """Says for each kernel which part of staging was hidden, and which part of its sweeps the rest took."""
    parts = []
    for kernel in staging.kernels:
        own = staging.of_kernel(kernel)
        hidden, exposed = int(own.hidden_ns.sum()), int(own.exposed_ns.sum())
        sweeps, sweep_ns = count(int(own.sweeps.sum()), "sweep"), int(own.sweep_ns.sum())
        share = percent(hidden, hidden + exposed)
        parts.append(
            f"in {sweeps} of {kernel} {share} of staging was hidden, the rest took {percent(exposed, sweep_ns)}"
        )
    return "; ".join(parts)


def _picture(own: Staging, kernel: str) -> Figure:
    """The share of a sweep that staging is exposed, by expert and warp."""
    rows = group_rows(len(own), own.rank, own.expert)
    names = [f"{rank} · {expert}" for rank, expert in zip(*(column.tolist() for column in rows.columns), strict=True)]
    warps = sorted(set(own.warp.tolist()))
    cells = [[0.0] * len(warps) for _ in names]
    hover = [[""] * len(warps) for _ in names]
    for place, row in enumerate(rows.group.tolist()):
        column = warps.index(int(own.warp[place]))
        hidden, exposed, sweep = int(own.hidden_ns[place]), int(own.exposed_ns[place]), int(own.sweep_ns[place])
        cells[row][column] = 100 * exposed / max(sweep, 1)
        hover[row][column] = (
            f"rank {own.rank[place]}, expert {own.expert[place]}, warp {own.warp[place]}<br>"
            f"{count(int(own.sweeps[place]), 'sweep')}, {duration(sweep)}<br>"
            f"hidden {percent(hidden, hidden + exposed)} of staging, exposed {duration(exposed)}"
        )
    return heatmap(
        names[:_MAX_ROWS],
        cells[:_MAX_ROWS],
        hover[:_MAX_ROWS],
        [],
        f"Exposed staging of {kernel}: rows are experts, columns are warps",
        columns=[f"warp {warp}" for warp in warps],
        axes=("rank · expert", f"share of a sweep of {kernel} in which staging is exposed"),
        say="{:.3g} %".format,
    )


def _table(staging: Staging) -> str:
    lines = []
    for kernel in staging.kernels:
        own = staging.of_kernel(kernel)
        whole = int(own.sweep_ns.sum())
        steps = [int(column.sum()) for column in (own.stage_ns, own.park_ns, own.decode_ns, own.multiply_ns)]
        shares = [percent(ns, whole) for ns in (*steps, whole - sum(steps))]
        hidden = int(own.hidden_ns.sum())
        lines.append([escape(kernel), duration(whole), *shares, percent(hidden, hidden + sum(steps[:3]))])
    columns = ["", "sweeps", "stage", "park", "decode", "load_b, multiply", "rest", "hidden of staging"]
    return table(columns, lines, numbers=7)


def describe_rings(rings: RingSteps) -> str:
    """Says for each rank and kernel how long its consumers waited, and what limits the ring if the record tells."""
    parts = []
    for row in range(len(rings)):
        where = f"rank {rings.rank[row]} {rings.kernels[rings.kernel[row]]}"
        whole, limit = int(rings.tile_ns[row]), rings.limit(row)
        columns = (rings.consumer_ns[:, 0], rings.decode_ns, rings.rest_ns)
        waited, decoded, rest = (percent(int(ns[row]), whole) for ns in columns)
        told = f"{limit.value} limits it" if limit else f"what limits it is not told, {rest} was in no step"
        parts.append(
            f"in {count(int(rings.tiles[row]), 'tile')} of {where} consumers waited {waited} for stages "
            f"and decoded about {decoded}: {told}"
        )
    return "; ".join(parts)


def _ring_table(rings: RingSteps) -> str:
    lines = []
    for row in range(len(rings)):
        whole = int(rings.tile_ns[row])
        steps = [*rings.consumer_ns[row].tolist(), int(rings.decode_ns[row]), int(rings.rest_ns[row])]
        produced, limit = rings.producer_ns[row].tolist(), rings.limit(row)
        lines.append(
            [
                escape(f"rank {rings.rank[row]} {rings.kernels[rings.kernel[row]]}"),
                escape(limit.value if limit else "not told"),
                duration(whole),
                *(percent(ns, whole) for ns in steps),
                *(percent(ns, sum(produced)) for ns in produced),
            ]
        )
    columns = ["", "limited by", "tiles", "wait_stage", "multiply_stage", "of it decoding", "rest"]
    columns += ["wait_slot", "issue_copy"]
    return table(columns, lines, numbers=7)
