"""Transfers between hosts and processes: one-sided writes with counted immediates, over libfabric (docs/fabric.md).

Names are those of pplx-garden's fabric library, after the TransferEngine of arXiv 2510.27656.
"""

from __future__ import annotations

from tracekern.fabric.done import DoneCounter, DoneFlag, TransferError
from tracekern.fabric.engine import (
    DomainAddress,
    ImmCounter,
    MemoryRegionDescriptor,
    MemoryRegionHandle,
    Net,
    ScalarWatcher,
    Transfer,
    TransferEngine,
    TransferEngineBuilder,
)
from tracekern.fabric.requests import (
    DomainGroupRouting,
    GroupTransferRouting,
    PageIndices,
    PeerGroupHandle,
    ScatterSlice,
    count_immediates,
)

__all__ = [
    "DomainAddress",
    "DomainGroupRouting",
    "DoneCounter",
    "DoneFlag",
    "GroupTransferRouting",
    "ImmCounter",
    "MemoryRegionDescriptor",
    "MemoryRegionHandle",
    "Net",
    "PageIndices",
    "PeerGroupHandle",
    "ScalarWatcher",
    "ScatterSlice",
    "Transfer",
    "TransferEngine",
    "TransferEngineBuilder",
    "TransferError",
    "count_immediates",
]
