"""What ran side by side? Kernels of several streams of a rank, such as an exchange beside experts."""

from __future__ import annotations

from tracekern.analysis.findings import Findings
from tracekern.analysis.overlap import StreamOverlap
from tracekern.formatting import duration, escape, percent, sentence
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.question import Question

_ASIDE = (
    "A stream is busy from the first record of a kernel to its last, so that waiting for other ranks inside it counts. "
    "Beside: a kernel of another stream of the same rank ran at that time. Without set-up and the first iteration."
)


def draw(findings: Findings) -> Answer | None:
    streams = findings.overlap
    if not streams:
        return None
    return Answer(escape(sentence(describe_overlap(streams))), (_table(streams),), _ASIDE)


QUESTION = Question("overlap", "Overlap", "What ran side by side?", draw, order=45)


def describe_overlap(streams: tuple[StreamOverlap, ...]) -> str:
    """Says for each rank which share of its least busy stream was hidden beside the others."""
    parts = []
    for rank in sorted({stream.rank for stream in streams}):
        least = min((stream for stream in streams if stream.rank == rank), key=lambda stream: stream.busy_ns)
        share, whole = percent(least.beside_ns, least.busy_ns), duration(least.busy_ns)
        parts.append(f"on rank {rank} {share} of {whole} of {' and '.join(least.kernels)} ran beside other kernels")
    return "; ".join(parts)


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
