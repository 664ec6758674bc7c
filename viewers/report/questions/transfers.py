"""Which transfers were waited for, and what held them up? Of captures with transfer engines."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.findings import Findings
from tracekern.analysis.questions.transfer_blame import TransferBlame, TransferBlames, blame_transfers
from tracekern.analysis.questions.transfers import TransferCause, TransferWaits
from tracekern.analysis.why.chance import MIN_ITERATIONS
from tracekern.formatting import count, duration, escape, percent, sentence
from tracekern.timeline.model import Timeline
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.question import Question

_MAX_LONGEST = 15
_MAX_BLAMES = 12
_ASIDE = (
    "A wait for immediates, or of a kernel for what comes over a network, is divided by the write that arrived last of "
    "those it was for: <i>late</i> until its transfer was submitted, or a kernel had asked for it; <i>not taken</i> "
    "until the proxy took the kernel's command; <i>queued</i> until it was posted, <i>under way</i> until it arrived, "
    "and what is left until it was <i>noticed</i>. <i>Beyond its peers</i> is how much longer its writes take than "
    "those of the median peer, where chance does not explain it. These are times of hosts, as recorded; ranks that "
    "wait at the same time each count."
)


def draw(findings: Findings) -> Answer | None:
    waits, blames = findings.transfers, findings.transfer_blames
    if waits is None:
        return None
    if blames is None:
        return Answer(escape(sentence(describe_transfers(waits))))
    tables = (_blames(blames.every), _longest(findings.timeline, waits))
    return Answer(escape(sentence(describe_transfers(waits, blames))), tables, _ASIDE)


QUESTION = Question("transfers", "Transfers", "Which transfers were waited for, and what held them up?", draw, order=65)


def describe_transfers(waits: TransferWaits, blames: TransferBlames | None = None) -> str:
    """Says what waits for transfers were for, and who stands out."""
    if not len(waits):
        return f"no wait for transfers has its write on record, of {count(waits.num_unmatched, 'wait')}"
    total = int(waits.wait_ns.sum())
    shares = sorted(((int(waits.of(cause).sum()), cause) for cause in TransferCause), key=lambda share: -share[0])
    parts = ", ".join(f"{percent(ns, total)} {cause.value}" for ns, cause in shares if ns)
    named = (blames or blame_transfers(waits)).named[:1]
    text = f"{count(len(waits), 'wait')} for transfers, {duration(total)}: {parts}"
    return text + "".join(f"; most beyond its peers: {describe_blame(blame)}" for blame in named)


def why_none_stands_out(blames: TransferBlames) -> str:
    """Says why nobody is accused of holding up waits for transfers."""
    if len(blames.senders) == 1:
        return f"rank {blames.senders[0]} alone sent what was waited for: there is no peer to compare it with"
    if blames.num_compared < 2:
        return f"the waits are too few to judge, {MIN_ITERATIONS} for each of two senders would do"
    return "no rank, queue or link takes longer than chance explains and holds up 1 % of the waiting"


def describe_evidence(blame: TransferBlame) -> str:
    """What makes it stand out."""
    more = f"{duration(blame.excess_ns)} more a write than its peers, by the mean of all that were waited for"
    return f"{more}; peers that are all alike show less than {duration(blame.alike_ns)}"


def describe_blame(blame: TransferBlame) -> str:
    """ "rank 1 submitted late, 3.2 ms of waiting (3.1 ms more than its peers)"."""
    more = f" ({duration(blame.beyond_ns)} more than its peers)" if blame.excess_ns else ""
    return f"{_what(blame)}, {duration(blame.waited_ns)} of waiting{more}"


def _what(blame: TransferBlame) -> str:
    return {
        TransferCause.LATE: f"rank {blame.rank} submitted late",
        TransferCause.NOT_TAKEN: f"the proxy of rank {blame.rank} took commands late",
        TransferCause.QUEUED: f"writes queued at rank {blame.rank} for {blame.domain}",
        TransferCause.UNDER_WAY: f"writes under way from rank {blame.rank} to {blame.peer} through {blame.domain}",
        TransferCause.NOTICED: f"rank {blame.rank} took long to see what had arrived",
    }[blame.cause]


def _blames(blames: tuple[TransferBlame, ...]) -> str:
    rows = [
        [
            escape(_what(blame)),
            duration(blame.waited_ns),
            duration(blame.beyond_ns) if blame.excess_ns else "-",
            f"{blame.num_waits:,}",
        ]
        for blame in blames[:_MAX_BLAMES]
    ]
    return table(["what held waits up", "waiting", "beyond its peers", "waits"], rows, numbers=3)


def _longest(timeline: Timeline, waits: TransferWaits) -> str:
    rows = []
    for place in np.argsort(-waits.wait_ns, kind="stable")[:_MAX_LONGEST].tolist():
        wait, whole = waits.row[place], waits.transfer[place] if waits.transfer[place] >= 0 else waits.write[place]
        kind = timeline.events[timeline.spans.event[wait]]
        moved = "-"
        if timeline.events[timeline.spans.event[whole]].has("bytes"):
            moved = f"{int(timeline.field(whole, 'bytes')[0]):,}"
        rows.append(
            [
                f"rank {waits.rank[place]}, "
                + (f"imm {int(timeline.field(wait, 'imm')[0])}" if kind.has("imm") else kind.name),
                f"rank {waits.source[place]}, {escape(waits.domains[int(waits.domain[place])])}",
                moved + ("" if waits.is_sure[place] else " (or another of this immediate)"),
                duration(int(waits.wait_ns[place])),
                *[duration(int(waits.of(cause)[place])) for cause in TransferCause],
            ]
        )
    columns = ["longest waits", "for a write of", "bytes of its transfer", "waited", *(c.value for c in TransferCause)]
    return table(columns, rows, numbers=5)
