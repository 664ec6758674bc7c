"""The CPU backend's device clocks stay within the sizes that the clock fit is judged by."""

import itertools

import numpy as np

from tracekern import _core
from tracekern.comm.communicator import Communicator
from tracekern.comm.devices.device import HostClock
from tracekern.comm.ranks.group import Group

SECOND = 1_000_000_000
T0 = 1_234 * SECOND + 567
SEEDS_AND_RANKS = list(itertools.product((1, 7, 2**63), range(8)))


def offsets_ns(seed, rank, host_ns):
    return _core.simulated_clock_ns(seed, rank, T0, host_ns) - host_ns


def test_offset_rate_and_wander_are_within_their_limits():
    host_ns = T0 + np.arange(0, 61, dtype=np.int64) * SECOND
    for seed, rank in SEEDS_AND_RANKS:
        offset = offsets_ns(seed, rank, host_ns)
        assert abs(offset[0]) <= 250_000
        rate = np.diff(offset) / SECOND
        assert np.abs(rate).max() <= 4e-6
        # One peak to the other, 6 % of 4 ppm, seen through means over a second.
        assert 0.22e-6 <= np.ptp(rate) <= 0.241e-6


def test_every_seed_and_rank_has_its_own_clock():
    starts = {int(offsets_ns(seed, rank, np.array([T0]))[0]) for seed, rank in SEEDS_AND_RANKS}
    assert len(starts) == len(SEEDS_AND_RANKS)


def test_ticks_are_multiples_of_32_ns_and_never_fall():
    host_ns = T0 + np.arange(-5_000, 5_000, dtype=np.int64)
    ticks = _core.simulated_clock_ticks(7, 3, T0, host_ns)
    assert not (ticks % 32).any()
    assert set(np.unique(np.diff(ticks))) == {0, 32}
    behind = _core.simulated_clock_ns(7, 3, T0, host_ns) - ticks
    assert behind.min() == 0
    assert behind.max() == 31


def test_host_time_of_a_tick_is_the_inverse():
    host_ns = T0 + np.random.default_rng(5).integers(-SECOND, 3_600 * SECOND, 10_000)
    for seed, rank in SEEDS_AND_RANKS:
        back = _core.simulated_clock_host_ns(seed, rank, T0, _core.simulated_clock_ns(seed, rank, T0, host_ns))
        assert np.abs(back - host_ns).max() <= 1


def test_seed_0_is_the_hosts_clock():
    host_ns = T0 + np.arange(1_000, dtype=np.int64)
    np.testing.assert_array_equal(_core.simulated_clock_ns(0, 5, T0, host_ns), host_ns)
    np.testing.assert_array_equal(_core.simulated_clock_ticks(0, 5, T0, host_ns), host_ns // 32 * 32)


def test_only_the_hosts_clock_is_one_for_all_ranks(monkeypatch):
    monkeypatch.delenv("TRACEKERN_SIMULATED_CLOCK", raising=False)
    host_clock = HostClock().describe()["id"]
    assert host_clock
    assert Communicator(Group(0, 1), 1 << 16, timeout_s=5).device.clock.describe()["id"] == host_clock
    monkeypatch.setenv("TRACEKERN_SIMULATED_CLOCK", "7:0")
    assert Communicator(Group(0, 1), 1 << 16, timeout_s=5).device.clock.describe()["id"] == ""
