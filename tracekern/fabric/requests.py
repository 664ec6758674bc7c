"""What requests are made of: pages, slices for peers of a group, and how they are spread over the domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tracekern.errors import BadInput


@dataclass(frozen=True)
class PageIndices:
    """Pages of a region: page i lies at offset + indices[i] * stride."""

    indices: Sequence[int]
    stride: int
    offset: int = 0

    @property
    def as_native(self) -> tuple[list[int], int, int]:
        return list(self.indices), self.stride, self.offset


class DomainGroupRouting(NamedTuple):
    """Through which domains the writes to one peer go: round_robin() or pinned()."""

    num_shards: int
    """0: one for each domain."""
    domain: int | None = None

    @classmethod
    def round_robin(cls, num_shards: int = 0) -> DomainGroupRouting:
        """A write in so many shards, pages over so many domains; each request begins with another domain."""
        return cls(num_shards)

    @classmethod
    def pinned(cls, domain: int) -> DomainGroupRouting:
        """All through one domain."""
        return cls(1, domain)


class GroupTransferRouting(NamedTuple):
    """Through which domains the writes to the peers of a group go: shard_peers(), shard_bytes() or single()."""

    kind: int
    domain: int = 0

    @classmethod
    def shard_peers(cls) -> GroupTransferRouting:
        """What one peer gets through one domain, what the next one gets through another."""
        return cls(0)

    @classmethod
    def shard_bytes(cls) -> GroupTransferRouting:
        """A part of what each peer gets through each domain."""
        return cls(1)

    @classmethod
    def single(cls, domain: int = 0) -> GroupTransferRouting:
        """All through one domain."""
        return cls(2, domain)


ROUND_ROBIN = DomainGroupRouting.round_robin()
SHARD_PEERS = GroupTransferRouting.shard_peers()


class ScatterSlice(NamedTuple):
    """What one peer of a group gets: bytes of the source, and where in its memory they go."""

    num_bytes: int
    src_offset: int = 0
    dst_offset: int = 0


@dataclass(frozen=True)
class PeerGroupHandle:
    """Memory of peers that one scatter or barrier reaches. Of the engine that made it."""

    num_peers: int
    native: Any = field(repr=False, compare=False)


def count_immediates(request: PageIndices | DomainGroupRouting | GroupTransferRouting, num_domains: int = 1) -> int:
    """Returns how many immediates a request raises at its destination, whatever the bytes.

    Paged writes raise one for each page of their PageIndices; a write one for each shard of its routing; a scatter or
    barrier at each peer one, or one for each domain where its routing shards bytes. submit_imm() raises one.
    """
    if isinstance(request, PageIndices):
        return len(request.indices)
    if isinstance(request, DomainGroupRouting):
        return request.num_shards or num_domains
    if isinstance(request, GroupTransferRouting):
        return num_domains if request == GroupTransferRouting.shard_bytes() else 1
    raise BadInput(f"request is {request!r}; wanted PageIndices, DomainGroupRouting or GroupTransferRouting")
