"""Peers that die, stop or take memory back: every transfer ends, and what it ends with is true."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from fabric_pairs import ALL_NETS, LIMIT_S, LOOPBACK, Done, Pair, engine, wait_until
from fabric_processes import (
    PAGE,
    PAGES,
    PROVIDERS,
    PeerProcess,
    Source,
    both_providers,
    source_and_peer,
)

from tests.paths import TESTS
from tracekern.errors import BadInput
from tracekern.fabric import (
    DomainAddress,
    MemoryRegionDescriptor,
    ScatterSlice,
    TransferError,
)
from tracekern.fabric.stale import remove_stale_segments


@both_providers
def test_a_killed_peer_ends_its_transfers_and_a_new_one_takes_its_place(net):
    with source_and_peer(net) as (source, peer):
        assert source.write_once(peer.descriptor) is None
        done = Done()
        for _ in range(20):
            source.write_pages(peer.descriptor, done, imm=1)
        peer.signal(signal.SIGKILL)
        errors = done.wait(20)
        assert errors[-1] is not None
        assert "engine " in str(errors[-1])
        assert "of 1000 writes were posted" in str(errors[-1])
        wait_until(lambda: source.told)
        assert "is dead: it has ended" in source.told[0]
        assert "is dead: it has ended" in str(source.write_once(peer.descriptor))

        another = PeerProcess(net)
        assert source.write_once(another.descriptor) is None
        assert another.ask("sum") == str(PAGE)
        another.end()


@both_providers
def test_a_stopped_peer_is_dead_after_the_limit_and_its_transfers_stall(net):
    with source_and_peer(net, limit_s=1.0) as (source, peer):
        assert source.write_once(peer.descriptor) is None
        peer.signal(signal.SIGSTOP)
        done = Done()
        source.write_pages(peer.descriptor, done)
        (error,) = done.wait()
        assert error.outcome == "stalled"
        assert f"{PAGES} writes were posted" in str(error)
        wait_until(lambda: source.told)
        assert "is dead: nothing was heard from it for 1000 ms" in source.told[0]
        assert "is dead" in str(source.write_once(peer.descriptor))
        with pytest.raises(TransferError, match=r"is in use until stop\(\): writes from there have not ended") as held:
            source.engine.unregister_memory(source.src, timeout_s=0.1)
        assert held.value.outcome == "stalled"
        with pytest.raises(BadInput, match="is not registered here, or not any more"):
            source.write_once(peer.descriptor)

        peer.signal(signal.SIGCONT)  # the provider gives the writes back late
        wait_until(lambda: source.frees(source.src))
        with pytest.raises(BadInput, match="is not registered here, or not any more"):
            source.engine.unregister_memory(source.src)


@both_providers
def test_a_transfer_has_a_limit_of_its_own_and_its_peer_lives_on(net):
    with source_and_peer(net) as (source, peer):
        assert source.write_once(peer.descriptor) is None
        peer.signal(signal.SIGSTOP)
        done = Done()
        source.write_pages(peer.descriptor, done, timeout_s=0.2)
        (error,) = done.wait()
        assert error.outcome == "stalled"
        assert "the time limit is over" in str(error)
        peer.signal(signal.SIGCONT)
        assert source.write_once(peer.descriptor) is None
        assert source.told == []


@both_providers
def test_cancelling_drops_what_is_unposted_and_waits_for_the_rest(net):
    with source_and_peer(net) as (source, peer):
        assert source.write_once(peer.descriptor) is None
        peer.signal(signal.SIGSTOP)
        done = Done()
        transfer = source.write_pages(peer.descriptor, done, imm=3)
        time.sleep(0.1)  # as many are posted as there is room for
        source.engine.cancel(transfer)
        time.sleep(0.1)
        assert done.errors == []
        peer.signal(signal.SIGCONT)
        (error,) = done.wait()
        assert error.outcome == "cancelled"
        posted = int(str(error).split()[1])
        assert 0 < posted < PAGES
        assert str(error) == f"cancelled: {posted} of {PAGES} writes were posted, {posted} confirmed"
        wait_until(lambda: peer.ask("counted 3") == str(posted))
        assert peer.ask("counted 3") == str(posted)
        source.engine.cancel(transfer)
        assert source.write_once(peer.descriptor) is None


def test_cancelling_before_the_peer_has_answered_posts_nothing():
    with source_and_peer(LOOPBACK) as (source, peer):
        peer.signal(signal.SIGSTOP)
        done = Done()
        source.engine.cancel(source.write_pages(peer.descriptor, done))
        (error,) = done.wait()
        assert (error.outcome, str(error)) == ("cancelled", "cancelled: nothing was posted")


@both_providers
def test_a_group_ends_with_its_member_and_the_others_go_on(net):
    with source_and_peer(net) as (source, peer):
        another, done = PeerProcess(net), Done()
        group = source.engine.add_peer_group([peer.descriptor, another.descriptor])
        slices = [ScatterSlice(PAGE)] * 2
        source.engine.submit_scatter(group, source.src, slices, on_done=done)
        assert done.wait() == [None]
        another.end()
        source.engine.submit_scatter(group, source.src, slices, on_done=done)
        assert done.wait()[-1] is not None
        wait_until(lambda: source.told)
        assert source.write_once(peer.descriptor) is None
        assert "is dead: it has ended" in str(source.write_once(another.descriptor))


@both_providers
def test_an_engine_stops_though_its_peer_is_stopped(net):
    with source_and_peer(net) as (source, peer):
        assert source.write_once(peer.descriptor) is None
        peer.signal(signal.SIGSTOP)
        done = Done()
        for _ in range(3):
            source.write_pages(peer.descriptor, done)
        source.engine.stop()
        assert [error is None for error in done.wait(3)] == [False] * 3
        assert "stalled" in [error.outcome for error in done.errors]


@both_providers
def test_messages_to_a_stopped_peer_leave_room_for_others(net):
    with source_and_peer(net) as (source, peer):
        other = PeerProcess(net)
        assert source.write_once(peer.descriptor) is None
        to_peer, to_other = (DomainAddress.from_text(process.ask("address")) for process in (peer, other))
        peer.signal(signal.SIGSTOP)
        unanswered, answered = Done(), Done()
        for _ in range(2000):
            source.engine.submit_send(to_peer, bytes(8000), unanswered)
        source.engine.submit_send(to_other, b"hello", answered)
        assert "the peer takes no messages" in str(answered.wait()[0])
        assert unanswered.errors == []
        peer.signal(signal.SIGCONT)
        assert all("the peer takes no messages" in str(error) for error in unanswered.wait(2000))
        other.end()


@both_providers
def test_a_peer_that_is_stopped_says_so(net):
    with source_and_peer(net) as (source, peer):
        assert source.write_once(peer.descriptor) is None
        assert peer.ask("stop") == "done"
        assert "is dead: it was stopped" in str(source.write_once(peer.descriptor))


# ---- memory that is taken back ----


def write(pair: Pair, dst: MemoryRegionDescriptor) -> TransferError | None:
    done = Done()
    pair.source.submit_write(pair.src, dst, len(pair.sent), imm=1, on_done=done)
    return done.wait()[0]


def test_memory_that_was_unregistered_is_refused_and_can_be_registered_again(pair):
    handle, first = pair.target.register_tensor(pair.received)
    assert write(pair, first) is None
    pair.target.unregister_memory(handle)
    pair.received.zero_()
    for _ in range(2):
        error = write(pair, first)
        assert error.outcome == "failed"
        assert "the memory was unregistered" in str(error)
    assert not pair.received.any()

    _, again = pair.target.register_tensor(pair.received)
    assert again != first
    assert write(pair, again) is None
    assert torch.equal(pair.received, pair.sent)
    assert "the memory was unregistered" in str(write(pair, first))


def test_a_peer_that_comes_later_is_refused_as_well(pair):
    handle, gone = pair.target.register_tensor(pair.received)
    pair.target.unregister_memory(handle)
    assert "the memory was unregistered" in str(write(pair, gone))


def test_memory_stays_as_it_is_once_it_was_unregistered_in_mid_transfer(pair):
    handle, dst = pair.target.register_tensor(pair.received)
    done = Done()
    for _ in range(40):
        pair.source.submit_write(pair.src, dst, len(pair.sent), on_done=done)
    wait_until(lambda: pair.received.any())
    pair.target.unregister_memory(handle)
    pair.received.fill_(7)
    errors = done.wait(40)
    assert pair.received.eq(7).all()
    for error in errors:
        assert error is None or "the memory was unregistered" in str(error)


def test_source_memory_is_unregistered_when_its_writes_have_ended(pair):
    done = Done()
    for _ in range(20):
        pair.source.submit_write(pair.src, pair.dst, len(pair.sent), on_done=done)
    pair.source.unregister_memory(pair.src)
    assert done.errors == [None] * 20 or done.wait(20) == [None] * 20


def test_the_engine_keeps_the_memory_of_a_tensor_that_its_user_drops(pair):
    address = torch.full((1 << 16,), 5, dtype=torch.uint8)
    src, _ = pair.source.register_tensor(address)
    del address
    torch.zeros(1 << 16, dtype=torch.uint8)
    done = Done()
    pair.source.submit_write(src, pair.dst, 1 << 16, on_done=done)
    del src
    assert done.wait() == [None]
    assert pair.received[: 1 << 16].eq(5).all()


@both_providers
def test_memory_is_held_until_a_stopped_peer_confirms_or_dies(net):
    with source_and_peer(net) as (target, peer):
        handles = []
        for _ in range(2):
            handle, dst = target.engine.register_tensor(torch.ones(PAGE, dtype=torch.uint8))
            assert peer.ask(f"write {dst.to_bytes().hex()}") == "None"
            handles.append(handle)
        peer.signal(signal.SIGSTOP)
        for handle in handles:
            with pytest.raises(TransferError, match="may still write there: it has not confirmed") as held:
                target.engine.unregister_memory(handle, timeout_s=0.1)
            assert held.value.outcome == "stalled"
        peer.signal(signal.SIGCONT)
        target.engine.unregister_memory(handles[0])

        handle, dst = target.engine.register_tensor(torch.ones(PAGE, dtype=torch.uint8))
        assert peer.ask(f"write {dst.to_bytes().hex()}") == "None"
        peer.signal(signal.SIGSTOP)
        peer.signal(signal.SIGKILL)
        target.engine.unregister_memory(handle)


def test_a_peer_that_is_slow_to_answer_is_asked_again():
    with source_and_peer(LOOPBACK) as (source, peer):
        peer.signal(signal.SIGSTOP)
        done = Done()
        source.write_pages(peer.descriptor, done, timeout_s=0.1)
        (error,) = done.wait()
        assert error.outcome == "failed"
        assert "has not answered within the time limit: nothing was posted" in str(error)
        peer.signal(signal.SIGCONT)
        assert source.write_once(peer.descriptor) is None


@pytest.mark.parametrize("change", ["key", "bytes"])
def test_a_descriptor_that_was_changed_is_refused_by_its_owner(pair, change):
    packed = bytearray(pair.dst.to_bytes())
    packed[28 if change == "bytes" else len(packed) - 16] ^= 1
    error = write(pair, MemoryRegionDescriptor(bytes(packed)))
    assert "the descriptor is not the one that" in str(error)
    assert write(pair, pair.dst) is None


def test_a_descriptor_of_an_engine_that_was_at_the_address_before_is_refused(pair):
    packed = bytearray(pair.dst.to_bytes())
    packed[0] ^= 1  # the number of the engine
    error = write(pair, MemoryRegionDescriptor(bytes(packed)))
    assert "it has ended, and another engine is at its address" in str(error)
    assert write(pair, pair.dst) is None


def test_engines_that_were_at_an_address_before_do_not_hinder_who_is_there_now():
    made, done = Pair([LOOPBACK]), Done()
    whole = made.dst.to_bytes()
    for number in range(1, 200):  # none has answered when the first turns out to have ended
        earlier = MemoryRegionDescriptor(
            (int.from_bytes(whole[:8], "little") ^ number).to_bytes(8, "little") + whole[8:]
        )
        made.source.submit_write(made.src, earlier, 8, on_done=done)
        if number % 10 == 0:
            made.source.submit_write(made.src, made.dst, 8, on_done=done)
    errors = done.wait(218)
    assert errors.count(None) == 19
    said = {str(error).partition(" is dead: ")[2] for error in errors if error}
    assert said == {"it has ended, and another engine is at its address"}
    made.stop()


# ---- the provider fails ----


def test_a_queue_that_cannot_be_read_breaks_the_engine_and_not_the_process(shim):
    with source_and_peer(LOOPBACK) as (source, peer):
        assert source.write_once(peer.descriptor) is None
        done = Done()
        shim.set("shim_is_broken", 1)
        for _ in range(5):
            source.write_pages(peer.descriptor, done)
        for error in done.wait(5):
            assert "the engine is broken, make another one: read the completion queue" in str(error)
        wait_until(lambda: source.told)
        assert len(source.told) == 1
        assert "the engine is broken" in str(source.write_once(peer.descriptor))
        with pytest.raises(TransferError, match="the engine is broken"):
            source.engine.register_tensor(source.memory)
        source.engine.submit_send(source.engine.main_address, b"hello", done)
        assert "the engine is broken" in str(done.wait()[-1])
        source.engine.unregister_memory(source.src)

        shim.set("shim_is_broken", 0)
        another = Source(LOOPBACK)
        assert another.write_once(peer.descriptor) is None
        another.engine.stop()


def test_writes_that_were_confirmed_and_never_counted_are_reported(shim):
    source, target = Source(LOOPBACK, limit_s=1.0), Pair([LOOPBACK])
    shim.set("shim_num_lost", 3)
    done = Done()
    source.write_pages(target.dst, done, count=10, imm=1)
    assert done.wait() == [None]
    wait_until(lambda: source.told)
    assert "10 writes were confirmed by engine" in source.told[0]  # in three, of up to four pages
    assert source.write_once(target.dst) is None
    time.sleep(1.5)
    assert len(source.told) == 1
    source.engine.stop()
    target.stop()


def test_a_provider_without_room_for_receive_buffers_is_asked_again(shim):
    made, done = Pair([LOOPBACK], 64), Done()
    made.target.submit_bouncing_recvs(64, 8, lambda message: None)
    for _ in range(4):
        shim.set("shim_num_full", 50)
        made.source.submit_send(made.target.main_address, b"hello", done)
        done.wait()
    assert done.errors == [None] * 4
    made.target.register_tensor(made.sent)  # it goes on
    made.stop()


def test_half_of_a_failed_registration_is_taken_back(shim):
    """The second domain has no memory for it; and an engine that cannot be built leaves nothing open."""
    nets = ALL_NETS["two_domains"]
    made = engine(nets)
    before = shim.get("shim_num_regions")
    shim.set("shim_regs_until_full", 1)
    with pytest.raises(TransferError, match="register memory: Cannot allocate memory"):
        made.register_tensor(torch.zeros(64))
    assert shim.get("shim_num_regions") == before
    for number in range(4):
        shim.set("shim_regs_until_full", number)
        with contextlib.suppress(TransferError):
            engine(nets).stop()
        assert shim.get("shim_num_regions") == before
    made.stop()


FEW_FILES = """
import os, resource, sys
sys.path.insert(0, sys.argv[1])
from fabric_pairs import LOOPBACK, engine
from tracekern.fabric import TransferError
engine([LOOPBACK]).stop()
def files():
    return len(os.listdir("/proc/self/fd"))
before, (soft, hard), said = files(), resource.getrlimit(resource.RLIMIT_NOFILE), set()
for room in range(2, 24):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + room, hard))
    try:
        engine([LOOPBACK]).stop()
    except TransferError as error:
        said.add(str(error))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert files() == before, (room, files(), before)
assert said
"""


def test_an_engine_that_finds_no_files_leaves_none_open():
    subprocess.run([sys.executable, "-c", FEW_FILES, str(TESTS)], check=True, timeout=2 * LIMIT_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small /dev/shm")
def test_a_full_dev_shm_is_told_with_its_room():
    code = "from tracekern.fabric import Net, TransferEngine; TransferEngine([Net('shm', '')])"
    mounted = 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"'
    words = ["unshare", "-m", "sh", "-c", mounted, "-", sys.executable, "-c", code]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert "provider shm: /dev/shm has 2 MiB free, too few for an engine" in ended.stderr.splitlines()[-1]


# ---- processes ----


def test_a_forked_child_is_refused_and_ends(tcp):
    made = tcp
    assert write(made, made.dst) is None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for act in (
            lambda: made.source.submit_write(made.src, made.dst, 8, on_done=Done()),
            lambda: made.source.register_tensor(made.sent),
            lambda: made.source.unregister_memory(made.src),
            lambda: made.target.make_imm_counter(5),
        ):
            try:
                act()
            except (BadInput, TransferError) as error:
                said.append(str(error))
        made.stop()
        os.write(writer, "\n".join(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        lines = answers.read().splitlines()
    _, status = os.waitpid(child, 0)
    assert (len(lines), status) == (4, 0)
    assert set(lines) == {
        "the engine was made before this process was forked, and cannot be used here; make one after the fork"
    }
    assert write(made, made.dst) is None


def test_segments_whose_marker_nobody_holds_are_removed_and_no_others(tmp_path):
    """Those of a process in another namespace look like those of a dead one, but for the lock."""
    for name in ("1-2:0:0", "1-2:0:0.tracekern", "3-4:0:0", "3-4:0:0.tracekern", "5-6:0:0", "notes", ".tracekern"):
        (tmp_path / name).write_text("x")
    (tmp_path / "link.tracekern").symlink_to(tmp_path / "notes")
    with open(tmp_path / "3-4:0:0.tracekern") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_stale_segments(tmp_path)
    left = ["3-4:0:0", "3-4:0:0.tracekern", "5-6:0:0", "notes", ".tracekern", "link.tracekern"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left)


def test_an_engine_removes_what_a_killed_one_left():
    peer = PeerProcess(PROVIDERS["shm"])
    left = list(Path("/dev/shm").glob(f"{peer.process.pid}-*"))
    assert len(left) == 2  # with its marker
    peer.end()
    assert all(path.exists() for path in left)
    engine(ALL_NETS["shm"]).stop()
    assert not any(path.exists() for path in left)


def test_members_join_and_leave_while_traffic_flows():
    net = LOOPBACK
    target = Pair([net], num_bytes=PAGE)
    counts = threading.Semaphore(0)
    target.target.set_imm_callback(lambda imm: counts.release())
    steady, is_over = Source(net), threading.Event()
    results: list[TransferError | None] = []

    def flow() -> None:
        while not is_over.is_set():
            results.append(steady.write_once(target.dst))

    thread = threading.Thread(target=flow)
    thread.start()
    for _ in range(10):
        member, done = Source(net), Done()
        member.write_pages(target.dst, done, count=50, imm=1)
        assert done.wait() == [None]
        member.engine.stop()
    is_over.set()
    thread.join()
    for _ in range(500):
        assert counts.acquire(timeout=LIMIT_S)
    assert results == [None] * len(results)
    assert steady.told == []
    steady.engine.stop()
    target.stop()
