"""Work or wait? Shares of the warps' time, and the waits by phase."""

from __future__ import annotations

from tracekern.analysis.findings import Findings
from tracekern.analysis.waits.full_rings import DryRing, FullRing
from tracekern.analysis.waits.ring_fill import RingFill
from tracekern.analysis.why.chain import Chain
from tracekern.formatting import count, duration, escape, percent
from tracekern.viewers.report.charts import stacked_bars, time_scale
from tracekern.viewers.report.frame import Answer, Figure, table
from tracekern.viewers.report.question import Question
from tracekern.viewers.report.questions.path import describe_part

_CLASS_WORDS = {
    "late_sender": "the sender came late",
    "drain": "the sender's stores drained",
    "visibility": "the flag took to be seen",
    "late_receiver": "the receiver freed its slots late",
    "barrier_late": "others came late to the barrier",
    "completion": "a barrier was completed",
    "unmatched": "no signal on record",
}
TIME_PARTS = (
    ("work", "--work", ""),
    ("signal", "--signal", "."),
    ("sync", "--sync", "x"),
    ("wait", "--wait", "/"),
    ("between_spans", "--gap", ""),
)
_CLASS_LOOKS = {
    "late_sender": ("--wait", "/"),
    "barrier_late": ("--passed", ""),
    "drain": ("--link", "."),
    "visibility": ("--host", ""),
    "late_receiver": ("--sync", "x"),
    "completion": ("--launch", ""),
    "unmatched": ("--gap", "-"),
}
_MAX_PHASES = 10
_MAX_LINKS = 8
_MAX_RINGS = 8
_FULL_SHARE = 0.01
"""Rings that are full for less of their sender's time are not told of."""


def draw(findings: Findings) -> Answer:
    time = findings.time
    totals = {name: int(getattr(time, name).sum()) for name, *_ in TIME_PARTS}
    whole = sum(totals.values())
    if not whole:
        return Answer("No span of a kernel has ended here, so there is no time to share out.")
    said = ", ".join(f"{percent(ns, whole)} {name.replace('_', ' ')}" for name, ns in totals.items() if ns)
    answer = f"The warps spent <b>{percent(totals['wait'], whole)}</b> of their time waiting: {said}."
    body: list[str | Figure] = [_share_bars(findings)]
    if findings.phases:
        body += [
            "<h3>The waits, by phase and by what they waited for</h3>",
            _phase_bars(findings),
            _phase_table(findings),
        ]
    if findings.ring_fills:
        body += ["<h3>How full the rings were</h3>", _fill_table(findings)]
    filled = {_place(fill) for fill in findings.ring_fills}
    others = [ring for ring in told_rings(findings) if _place(ring) not in filled]
    body += [f"<p>R{escape(describe_ring(ring))[1:]}.</p>" for ring in others[:_MAX_RINGS]]
    if chains := findings.longest_waits:
        body += ["<h3>The longest waits by phase, and why they lasted</h3>", _chain_table(chains)]
    aside = (
        "A warp's time runs from its first record in a launch to its last. The time between launches is not part "
        "of it, nor is the time before a warp's first record in a launch, which is another "
        f"{duration(int(time.not_started.sum()))}."
    )
    return Answer(answer, body, aside)


QUESTION = Question("time", "Time", "Work or wait?", draw, order=20)


def told_rings(findings: Findings) -> list[FullRing]:
    """Rings that were full for long enough to tell of it, those that the summary names first, then the worst."""
    named = named_rings(findings)
    return [*named, *(ring for ring in findings.full_rings if ring.share >= _FULL_SHARE and ring not in named)]


def named_rings(findings: Findings) -> list[FullRing]:
    """The worst ring of each of two channels: of rings back to back the first fills because the second is full."""
    worst = {ring.channel: ring for ring in reversed(findings.full_rings) if ring.share >= _FULL_SHARE}
    return sorted(worst.values(), key=lambda ring: -ring.share)[:2]


def describe_ring(ring: FullRing) -> str:
    """ "rank 1's ring of 12 slots (channel credit) is full 6 % of the time of rank 0's kernels"."""
    size = f" of {count(ring.slots, 'slot')}" if ring.slots else ""
    which = f", the fullest of {ring.num_rings}" if ring.num_rings > 1 else ""
    share = percent(ring.full_ns, ring.kernels_ns)
    return (
        f"rank {ring.receiver}'s ring{size} (channel {ring.channel}{which}) is full {share} of the time of "
        f"rank {ring.sender}'s kernels"
    )


def _place(ring: FullRing | DryRing | RingFill) -> tuple[str, int, int]:
    return ring.channel, ring.sender, ring.receiver


def _fill_table(findings: Findings) -> str:
    named = [_place(ring) for ring in named_rings(findings)]
    full = {_place(ring): (ring.full_ns, ring.kernels_ns) for ring in findings.full_rings}
    dry = {_place(ring): (ring.dry_ns, ring.kernels_ns) for ring in findings.dry_rings}

    def trouble(fill: RingFill) -> tuple[bool, int]:
        place = _place(fill)
        return place in named, max(times.get(place, (0, 1))[0] for times in (full, dry))

    fills = sorted(findings.ring_fills, key=trouble, reverse=True)
    rows = []
    for fill in fills[:_MAX_RINGS]:
        place = _place(fill)
        slots = f"{fill.mean_slots:.1f}", f"{fill.most_slots:,}", f"{fill.slots:,}" if fill.slots else "not known"
        shares = [percent(*times[place]) if place in times else "never" for times in (full, dry)]
        rows.append((f"{fill.channel}, rank {fill.sender} to rank {fill.receiver}", *slots, *shares))
    titles = ["ring", "slots full on average", "at most", "of", "full, its sender waits", "dry, its receiver waits"]
    more = f"<p class='aside'>and {count(len(fills) - len(rows), 'more ring')}</p>" if len(fills) > len(rows) else ""
    return table(titles, rows, numbers=5) + more


def _share_bars(findings: Findings) -> Figure:
    time = findings.time
    total = [max(1, ns) for ns in time.total.tolist()]
    parts, hover = [], []
    for name, color, pattern in TIME_PARTS:
        values, label = getattr(time, name).tolist(), name.replace("_", " ")
        if not any(values):
            continue
        parts.append((label, color, pattern, [100 * ns / whole for ns, whole in zip(values, total, strict=True)]))
        hover.append(
            [
                f"rank {rank}: {label}<br>{duration(ns)}, {percent(ns, whole)} of its warps' {duration(whole)}"
                for rank, ns, whole in zip(time.ranks, values, total, strict=True)
            ]
        )
    rows = [f"rank {rank}" for rank in time.ranks]
    return stacked_bars(
        rows,
        parts,
        axis="share of the warps' time",
        says="Shares of work and wait, by rank",
        is_share=True,
        hover=hover,
    )


def _phase_bars(findings: Findings) -> Figure:
    phases = findings.phases[:_MAX_PHASES]
    unit, size = time_scale([phase.sum_ns for phase in phases])
    parts, hover = [], []
    for name, (color, pattern) in _CLASS_LOOKS.items():
        values = [phase.by_class[name] for phase in phases]
        if not any(values):
            continue
        parts.append((_CLASS_WORDS[name], color, pattern, [ns / size for ns in values]))
        hover.append(
            [
                f"{escape(phase.phase)}<br>{_CLASS_WORDS[name]}: {duration(ns)}, {percent(ns, phase.sum_ns)}"
                for phase, ns in zip(phases, values, strict=True)
            ]
        )
    rows = [str(phase.phase) for phase in phases]
    return stacked_bars(
        rows, parts, axis=f"{unit} of waiting, over all warps", says="Waits by phase and class", hover=hover
    )


def _phase_table(findings: Findings) -> str:
    rows = [
        [
            f"<code>{escape(phase.phase)}</code>",
            f"{phase.count:,}",
            duration(phase.sum_ns),
            duration(phase.max_warp_ns),
            duration(phase.p50_ns),
            duration(phase.p99_ns),
        ]
        for phase in findings.phases[:_MAX_PHASES]
    ]
    rest = findings.phases[_MAX_PHASES:]
    more = (
        f"<p class='aside'>and {count(len(rest), 'more phase')}, {duration(sum(p.sum_ns for p in rest))}</p>"
        if rest
        else ""
    )
    if wrong_order_ns := sum(phase.wrong_order_ns for phase in findings.phases):
        late_ns = sum(phase.by_class["late_sender"] for phase in findings.phases)
        more += (
            f"<p class='aside'>In {percent(wrong_order_ns, late_ns)} of the {duration(late_ns)} of waiting for late "
            "senders, another message for the same warp had already arrived. Taking messages in their order of arrival "
            f"would have given it work for {duration(wrong_order_ns)}.</p>"
        )
    if endless := sum(phase.num_endless for phase in findings.phases):
        more += (
            f"<p class='aside'>{count(endless, 'wait')} never ended. They count until their kernel ended, or else "
            "until their rank was last heard of.</p>"
        )
    if headless := sum(phase.num_headless for phase in findings.phases):
        more += (
            f"<p class='aside'>The flight recorder overwrote the begin of {count(headless, 'wait')}. Sums count them "
            "from the oldest record of their warp; quantiles leave them out.</p>"
        )
    return table(["phase", "waits", "sum", "longest warp", "p50", "p99"], rows, numbers=5) + more


def _chain_table(chains: tuple[Chain, ...]) -> str:
    rows = [
        [
            f"<code>{escape(chain.phase)}</code> of rank {chain.rank}{', in start-up' if chain.is_start_up else ''}",
            duration(chain.wait_ns),
            _chain(chain),
        ]
        for chain in chains[:_MAX_PHASES]
    ]
    return table(["wait", "lasted", "why, from its end back to its begin"], rows)


def _chain(chain: Chain) -> str:
    links = [f"{escape(describe_part(link))} <b>{duration(link.time_ns)}</b>" for link in chain.links]
    if len(links) > _MAX_LINKS:
        hidden = slice(_MAX_LINKS - 2, -1)
        hidden_ns = sum(link.time_ns for link in chain.links[hidden])
        links[hidden] = [f"{len(links[hidden])} more <b>{duration(hidden_ns)}</b>"]
    return " ← ".join(links) or "nothing on record ended it"
