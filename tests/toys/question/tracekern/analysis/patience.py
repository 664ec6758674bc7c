"""How patient is a run? The toy's numbers."""

from __future__ import annotations

from dataclasses import dataclass

from tracekern.analysis.findings import Findings


@dataclass(frozen=True)
class Patience:
    num_waits: int
    longest_ns: int
    num_causes: int


def find_patience(findings: Findings) -> Patience:
    waits = findings.waits
    return Patience(len(waits), int(waits.wait_ns.max()), len(findings.answer.costs))
