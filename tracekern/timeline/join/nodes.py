"""Which node each rank is on, and what the node is called: `Rank.node` of a timeline that load() returns."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from tracekern.timeline.model import Rank, Timeline


def name_nodes(pieces: Sequence[Timeline]) -> list[Timeline]:
    """Returns the ranks' Timelines with equal `node` for ranks of one node, and different ones for all others.

    A node is a machine, whatever its containers call it, with the host name of its lowest rank. Machines that share a
    name get numbers, "worker#0" and "worker#1". Where all ranks are on one machine and the settings of the run split
    them into `nodes`, as `tracekern run moe --nodes` does, each part is a node: "worker/0" and "worker/1".
    """
    ranks = [piece.ranks[0] for piece in pieces]
    hosts = {rank.machine: rank.node for rank in sorted(ranks, key=lambda rank: -rank.rank)}
    if len(hosts) == 1:
        names = [f"{hosts[rank.machine]}{_part(rank)}" for rank in ranks]
    else:
        of_machine = _numbered({rank.machine: hosts[rank.machine] for rank in ranks})
        names = [of_machine[rank.machine] for rank in ranks]
    return [
        piece.replace(ranks=(dataclasses.replace(rank, node=name),))
        for piece, rank, name in zip(pieces, ranks, names, strict=True)
    ]


def _numbered(hosts: dict[str, str]) -> dict[str, str]:
    """Machine -> name of its node. hosts: machine -> host name, in the order of the numbers."""
    shared, named = Counter(hosts.values()), Counter[str]()
    names = {}
    for machine, host in hosts.items():
        names[machine] = f"{host}#{named[host]}" if shared[host] > 1 else host
        named[host] += 1
    return names


def _part(rank: Rank) -> str:
    """ "/1" for a rank of the second part that the run's settings call a node; "" where they split nothing."""
    settings, num_ranks = rank.metadata.get("settings"), rank.metadata.get("num_ranks", 0)
    settings = settings if isinstance(settings, dict) else {}
    nodes, is_uneven = settings.get("nodes"), settings.get("transport") == "fabric"
    if not isinstance(nodes, int) or not 2 <= nodes <= num_ranks or (num_ranks % nodes and not is_uneven):
        return ""
    return f"/{rank.rank * nodes // num_ranks}"
