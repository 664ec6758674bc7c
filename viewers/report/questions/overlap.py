"""What ran side by side? Kernels of several streams of a rank, or ranges of several threads of its host."""

from __future__ import annotations

from tracekern.analysis.findings import Findings
from tracekern.analysis.overlap import RankThreads, StreamOverlap
from tracekern.formatting import duration, escape, percent, sentence
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.question import Question

_ASIDE = (
    "A stream is busy from the first record of a kernel to its last, so that waiting for other ranks inside it counts. "
    "Beside: a kernel of another stream of the same rank ran at that time. Without set-up and the first iteration."
)
_ASIDE_OF_THREADS = (
    "Ranges are those of <code>tracekern.range()</code>, named by their first words. Beside: a range of another thread "
    "of the same rank was open at that time. What a range waits for counts as well."
)


def draw(findings: Findings) -> Answer | None:
    streams, ranks = findings.overlap, findings.threads
    parts = [describe_overlap(streams)] * bool(streams) + [describe_threads(ranks)] * bool(ranks)
    if not parts:
        return None
    tables = (_table(streams),) * bool(streams) + (_table_of_threads(ranks),) * bool(ranks)
    aside = " ".join([_ASIDE] * bool(streams) + [_ASIDE_OF_THREADS] * bool(ranks))
    return Answer(escape(sentence("; ".join(parts))), tables, aside)


QUESTION = Question("overlap", "Overlap", "What ran side by side?", draw, order=45)


def describe_overlap(streams: tuple[StreamOverlap, ...]) -> str:
    """Says for each rank which share of its least busy stream was hidden beside the others."""
    parts = []
    for rank in sorted({stream.rank for stream in streams}):
        least = min((stream for stream in streams if stream.rank == rank), key=lambda stream: stream.busy_ns)
        share, whole = percent(least.beside_ns, least.busy_ns), duration(least.busy_ns)
        parts.append(f"on rank {rank} {share} of {whole} of {' and '.join(least.kernels)} ran beside other kernels")
    return "; ".join(parts)


def describe_threads(ranks: tuple[RankThreads, ...]) -> str:
    """Says for which share of its ranges' time each rank had those of several threads open."""
    shares = [
        f"{percent(rank.several_ns, rank.covered_ns)} of {duration(rank.covered_ns)} on rank {rank.rank}"
        for rank in ranks
    ]
    return f"ranges of several threads were open side by side for {', '.join(shares)}"


def _table(streams: tuple[StreamOverlap, ...]) -> str:
    lines = [
        [
            f"rank {stream.rank}",
            escape(", ".join(stream.kernels)),
            duration(stream.busy_ns),
            duration(stream.beside_ns),
            percent(stream.beside_ns, stream.busy_ns),
        ]
        for stream in streams
    ]
    return table(["", "kernels of a stream", "busy", "beside others", "share"], lines, numbers=3)


def _table_of_threads(ranks: tuple[RankThreads, ...]) -> str:
    lines = [
        [
            f"rank {rank.rank}",
            escape(", ".join(thread.ranges)),
            duration(thread.busy_ns),
            duration(thread.beside_ns),
            percent(thread.beside_ns, thread.busy_ns),
        ]
        for rank in ranks
        for thread in rank.threads
    ]
    return table(["", "ranges of a thread", "busy", "beside others", "share"], lines, numbers=3)
