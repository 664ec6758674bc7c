"""What ran side by side? Kernels of several streams of a rank, or ranges of several threads of its host."""

from __future__ import annotations

from tracekern.analysis.findings import Findings
from tracekern.analysis.questions.overlap import RankThreads, StreamOverlap
from tracekern.formatting import duration, escape, percent, sentence
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.question import Question

_ASIDE = (
    "A stream is busy from the first record of a kernel to its last, so that waiting for other ranks inside it counts. "
    "Beside: a kernel of another stream of the same rank ran at that time. Set-up does not count, "
    "nor, of several iterations, the first."
)
_ASIDE_OF_THREADS = (
    "Ranges are those of <code>tracekern.range()</code>, named by their first words. Beside: a range of another thread "
    "of the same rank was open at that time. What a range waits for counts as well."
)


def draw(findings: Findings) -> Answer | None:
    streams, ranks = findings.overlap, findings.threads
    told: list[str] = []
    tables: list[str] = []
    asides: list[str] = []
    if streams:
        told.append(describe_overlap(streams))
        rows = [(one.rank, one.kernels, one.busy_ns, one.beside_ns) for one in streams]
        tables.append(_table("kernels of a stream", rows))
        asides.append(_ASIDE)
    if ranks:
        told.append(describe_threads(ranks))
        rows = [(rank.rank, one.ranges, one.busy_ns, one.beside_ns) for rank in ranks for one in rank.threads]
        tables.append(_table("ranges of a thread", rows))
        asides.append(_ASIDE_OF_THREADS)
    if not told:
        return None
    return Answer(escape(sentence("; ".join(told))), tuple(tables), " ".join(asides))


QUESTION = Question("overlap", "Overlap", "What ran side by side?", draw, order=45)


def describe_overlap(streams: tuple[StreamOverlap, ...]) -> str:
    """Says for each rank which share of its least busy stream was hidden beside the others."""
    parts = []
    for rank in sorted({stream.rank for stream in streams}):
        least = min((stream for stream in streams if stream.rank == rank), key=lambda stream: stream.busy_ns)
        share, whole = percent(least.beside_ns, least.busy_ns), duration(least.busy_ns)
        parts.append(f"on rank {rank} {' and '.join(least.kernels)} ran beside other kernels for {share} of {whole}")
    return "; ".join(parts)


def describe_threads(ranks: tuple[RankThreads, ...]) -> str:
    """Says for which share of its ranges' time each rank had those of several threads open."""
    shares = [
        f"{percent(rank.several_ns, rank.covered_ns)} of {duration(rank.covered_ns)} on rank {rank.rank}"
        for rank in ranks
    ]
    return f"ranges of several threads were open side by side for {', '.join(shares)}"


def _table(what: str, rows: list[tuple[int, tuple[str, ...], int, int]]) -> str:
    """rows: (rank, names, busy ns, ns of that beside others)."""
    lines = [
        [f"rank {rank}", escape(", ".join(names)), duration(busy), duration(beside), percent(beside, busy)]
        for rank, names, busy, beside in rows
    ]
    return table(["", what, "busy", "beside others", "share"], lines, numbers=3)
