"""Relates ranks that took no clock samples with each other: by the wall clocks of their hosts.

Ranks of one machine read one wall clock. Those of two hosts are related by the round trips of their transfer engines,
which are stamped with it. A rank's own clock is placed beside its host's by its brackets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.format import CLOCK_SAMPLE, HOST_CLOCK, SampleKind
from tracekern.timeline.clocks.course import through_anchors
from tracekern.timeline.clocks.fit import UnrelatedClocks, apply_clock, fit_clocks, unaligned_clocks
from tracekern.timeline.clocks.host_times import bracket_rows, relate_hosts
from tracekern.timeline.join.engine_peers import NO_RANK, introduced, peer_of
from tracekern.timeline.model import ClockFit, Rank, Timeline, TrackKind, unpack_field

_ROUND_TRIP = "round_trip"
_BIAS = 1 << 44
"""Of field `ahead`: csrc/fabric/clock_stamps.hpp."""
_ROUND_NS = 500_000_000
"""Round trips to a peer come in bursts, a second apart."""

_Samples = npt.NDArray[Any]


def fit_by_hosts(
    stamps: _Samples, samples: _Samples, ranks: Sequence[Rank], spans_ticks: Mapping[int, tuple[int, int]]
) -> dict[int, ClockFit]:
    """The map from ticks to axis ns of every rank; the axis is the wall clock of the reference rank's host.

    stamps: round_trips(). samples: clock samples of all ranks. Raises UnrelatedClocks where nothing relates two hosts,
    or a rank to its host.
    """
    hosts = [
        dataclasses.replace(
            rank,
            ticks_per_second=float(HOST_CLOCK["ticks_per_second"]),
            resolution_ticks=HOST_CLOCK["resolution_ticks"],
            clock_id=rank.machine,
        )
        for rank in ranks
    ]
    of_host = fit_clocks(stamps, hosts, _wall_spans(samples, ranks))
    own = unaligned_clocks(ranks, spans_ticks)
    for rank in ranks:
        span = spans_ticks.get(rank.rank)
        seen = {} if span is None else {rank.rank: _pair(apply_clock(own[rank.rank], np.array(span, np.int64)))}
        own = relate_hosts(samples, [rank], own, {}, seen)
    return {rank.rank: _through_host(rank, own[rank.rank], of_host[rank.rank]) for rank in ranks}


def round_trips(pieces: Sequence[Timeline]) -> _Samples:
    """[n] CLOCK_SAMPLE of kind PING_PONG, in ns of wall clocks: what the engines of these ranks asked each other."""
    found = introduced(pieces)
    rows = [np.empty(0, CLOCK_SAMPLE)]
    for piece in pieces:
        spans, is_engine = piece.spans, piece.tracks_of(TrackKind.ENGINE)
        of_event = np.array([event.name == _ROUND_TRIP for event in piece.events] or [False])
        asked = np.flatnonzero(of_event[spans.event] & is_engine[spans.track])
        if not len(asked):
            continue
        event = piece.events[spans.event[asked[0]]]
        ahead = unpack_field(event.begin_fields, "ahead", spans.begin_payload[asked]) - _BIAS
        numbers = unpack_field(event.begin_fields, "peer", spans.begin_payload[asked])
        tracks = [piece.tracks[track] for track in spans.track[asked].tolist()]
        peers = np.array(
            [peer_of(found, track, number) for track, number in zip(tracks, numbers.tolist(), strict=True)]
        )
        mine = np.zeros(len(asked), CLOCK_SAMPLE)
        mine["kind"], mine["initiator"], mine["responder"] = SampleKind.PING_PONG, piece.ranks[0].rank, peers
        mine["t0"], mine["t3"] = spans.start[asked], spans.end[asked]
        mine["t1"] = mine["t2"] = spans.start[asked] + ahead
        mine["round_idx"] = (mine["t0"] - mine["t0"].min()) // _ROUND_NS
        rows.append(mine[(peers != NO_RANK) & (mine["t3"] >= mine["t0"])])
    return np.concatenate(rows)


def _through_host(rank: Rank, own: ClockFit, host: ClockFit) -> ClockFit:
    """A rank's clock by way of its host's. own: with the map of the wall clock onto the rank's clock."""
    if not own.host_anchor_ns or math.isnan(own.host_hard_ns):
        raise UnrelatedClocks(
            f"rank {rank.rank} (node {rank.node}): nothing relates its clock to its host's, and no clock samples to "
            "other ranks; record with clock sampling on, or merge with --unaligned"
        )
    axis = through_anchors(host.anchor_ticks, host.anchor_ns, np.array(own.host_anchor_ns, np.int64))
    ticks = through_anchors(own.anchor_ns, own.anchor_ticks, np.array(own.host_axis_ns, np.int64))
    return dataclasses.replace(
        host,
        method="hosts",
        hard_ns=host.hard_ns + own.host_hard_ns,
        sigma_ns=max(host.sigma_ns, own.host_hard_ns / 2),
        anchor_ticks=tuple(ticks.tolist()),
        anchor_ns=tuple(axis.tolist()),
        host_anchor_ns=host.anchor_ticks,
        host_axis_ns=host.anchor_ns,
        host_hard_ns=host.hard_ns,
    )


def _wall_spans(samples: _Samples, ranks: Sequence[Rank]) -> dict[int, tuple[int, int]]:
    """rank -> (first, last) ns of its wall clock that its brackets name."""
    found = {}
    for rank in ranks:
        rows = bracket_rows(samples, rank.rank)
        if len(rows):
            found[rank.rank] = int(rows["t0"].min()), int(rows["t3"].max())
    return found


def _pair(times: npt.NDArray[np.int64]) -> tuple[int, int]:
    first, last = times.tolist()
    return first, last
