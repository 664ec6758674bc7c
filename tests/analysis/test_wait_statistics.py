"""Statistics of waits against plain loops."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import make_timeline, overwrite_begins, timelines

from tracekern.analysis.waits.analyze import CLASSES, analyze_waits
from tracekern.analysis.waits.statistics import KEYS, wait_statistics
from tracekern.timeline.model import Timeline


@given(timelines(), st.permutations(KEYS), st.integers(0, 4), st.sets(st.integers(0, 29)))
def test_statistics_are_those_of_plain_loops(timeline: Timeline, keys: list[str], num_keys: int, cut: set[int]):
    waits = analyze_waits(overwrite_begins(timeline, [row for row in cut if row < len(timeline.spans)]))
    by = keys[:num_keys]
    members: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i in range(len(waits)):
        names = {
            "rank": int(waits.rank[i]),
            "peer": int(waits.peer[i]),
            "phase": waits.phases[waits.phase[i]],
            "role": waits.roles[waits.role[i]],
        }
        members[tuple(names[key] for key in by)].append(i)
    rows = wait_statistics(waits, by)
    assert [row.sum_ns for row in rows] == sorted((row.sum_ns for row in rows), reverse=True)
    assert {tuple(getattr(row, key) for key in by) for row in rows} == set(members)
    for row in rows:
        mine = members[tuple(getattr(row, key) for key in by)]
        ns = waits.wait_ns[mine]
        of_track: dict[int, int] = defaultdict(int)
        for i in mine:
            of_track[int(waits.track[i])] += int(waits.wait_ns[i])
        assert (row.count, row.sum_ns, row.max_warp_ns) == (len(mine), int(ns.sum()), max(of_track.values()))
        whole = [int(waits.wait_ns[i]) for i in mine if int(waits.row[i]) not in cut]
        assert row.num_headless == len(mine) - len(whole)
        wanted = np.quantile(whole, (0.5, 0.99)) if whole else (np.nan, np.nan)
        assert (row.p50_ns, row.p99_ns) == pytest.approx(wanted, nan_ok=True)
        assert row.by_class == {name: int(getattr(waits, name)[mine].sum()) for name in CLASSES}
        assert all(getattr(row, key) is None for key in set(KEYS) - set(by))


def test_statistics_refuse_an_unknown_key():
    with pytest.raises(ValueError, match="no key 'warp'; wanted some of rank, phase, role, peer"):
        wait_statistics(analyze_waits(make_timeline()), ("rank", "warp"))
