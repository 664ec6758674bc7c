"""Messages between engines: lent to a callback, and what their sender is told when they cannot be."""

from __future__ import annotations

import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from fabric_pairs import ALL_NETS, LIMIT_S, NETS, Done, Pair, engine, wait_until
from fabric_processes import source_and_peer

from tracekern.errors import BadInput
from tracekern.fabric import DomainAddress, DoneCounter, DoneFlag, TransferEngine, TransferError

EXHAUSTED = "all of the peer's 2 receive buffers are in use; send it again"


def send(made: Pair, payload: bytes) -> None:
    """Returns when a callback has it. Raises TransferError."""
    flag = DoneFlag()
    made.source.submit_send(made.target.main_address, payload, flag)
    flag.wait(LIMIT_S)


def send_once_there_is_room(made: Pair, payload: bytes) -> None:
    """A buffer comes back only after its callback has returned."""
    for _ in range(1000):
        try:
            return send(made, payload)
        except TransferError as error:
            if "receive buffers are in use" not in str(error):
                raise
            time.sleep(0.001)
    raise AssertionError("no buffer has come back")


class Gate:
    """A callback that holds the messages it is lent until it may go on."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.may_go_on = threading.Event()

    def __call__(self, message: memoryview) -> None:
        assert self.may_go_on.wait(LIMIT_S)
        self.messages.append(bytes(message))


def test_five_hundred_messages_arrive_whole_in_buffers_that_go_round(tcp):
    messages: list[bytes] = []
    tcp.target.submit_bouncing_recvs(4000, 64, lambda message: messages.append(bytes(message)))
    sent = [bytes([number % 256]) * (8 * number) for number in range(500)]
    for first in range(0, 500, 50):  # no more than there are buffers
        done = Done()
        for payload in sent[first : first + 50]:
            tcp.source.submit_send(tcp.target.main_address, payload, done)
        assert done.wait(50) == [None] * 50
        wait_until(lambda count=first + 50: len(messages) == count)
    assert sorted(messages) == sorted(sent)


def test_a_sender_is_told_that_all_buffers_are_in_use_and_all_else_goes_on(tcp):
    gate = Gate()
    tcp.target.submit_bouncing_recvs(100, 2, gate)
    send(tcp, b"first")
    send(tcp, b"second")
    for _ in range(200):  # more than the engine has posted for itself
        with pytest.raises(TransferError, match=EXHAUSTED):
            send(tcp, b"third")
    late = engine(NETS["tcp"])  # is met, and writes
    src, _ = late.register_tensor(tcp.sent)
    done = Done()
    late.submit_write(src, tcp.dst, len(tcp.sent), on_done=done)
    assert done.wait() == [None]
    assert torch.equal(tcp.received, tcp.sent)
    gate.may_go_on.set()
    wait_until(lambda: len(gate.messages) == 2)
    send(tcp, b"third")
    wait_until(lambda: len(gate.messages) == 3)
    assert gate.messages == [b"first", b"second", b"third"]
    late.stop()


def test_a_view_ends_with_its_call_and_parts_that_are_kept_keep_their_buffer(tcp):
    views: list[memoryview] = []
    parts: list[memoryview] = []

    def keep(message: memoryview) -> None:
        assert message.readonly
        views.append(message)
        if len(message) == 10:
            parts.append(message[2:5])

    tcp.target.submit_bouncing_recvs(100, 2, keep)
    send(tcp, b"0123456789")
    for number in range(20):
        wait_until(lambda count=number + 1: len(views) == count)
        send_once_there_is_room(tcp, b"again")
    assert parts == [b"234"]
    send_once_there_is_room(tcp, b"abcdefghij")
    wait_until(lambda: len(parts) == 2)
    with pytest.raises(TransferError, match=EXHAUSTED):
        send(tcp, b"no buffer is left")
    assert parts == [b"234", b"cde"]
    del parts[:]
    send_once_there_is_room(tcp, b"again")
    with pytest.raises(ValueError, match="released"):
        bytes(views[1])


def test_a_sender_is_told_what_a_receiver_does_not_take(tcp):
    with pytest.raises(TransferError, match="the peer takes no messages; it has to call submit_bouncing_recvs"):
        send(tcp, b"hello")
    tcp.target.submit_bouncing_recvs(10, 1, lambda message: None)
    with pytest.raises(TransferError, match="the message is larger than the peer's receive buffers of 10 bytes"):
        send(tcp, b"12345678901")
    send(tcp, b"1234567890")
    send_once_there_is_room(tcp, b"")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_callback_that_raises_gives_its_buffer_back(tcp):
    calls: list[int] = []

    def fail(message: memoryview) -> None:
        calls.append(len(message))
        raise RuntimeError("of the user")

    tcp.target.submit_bouncing_recvs(10, 1, fail)
    for number in range(5):
        wait_until(lambda count=number: len(calls) == count)
        send_once_there_is_room(tcp, b"x")
    wait_until(lambda: len(calls) == 5)
    assert calls == [1] * 5


def test_messages_that_nobody_answers_end_with_the_time_limit():
    gone = Pair(NETS["tcp"])
    address = gone.target.main_address
    gone.stop()
    made, flag = TransferEngine(NETS["tcp"], connect_limit_s=0.3), DoneFlag()
    made.submit_send(address, b"hello", flag)
    with pytest.raises(TransferError):
        flag.wait(LIMIT_S)
    made.stop()


def test_messages_to_an_engine_of_this_process_that_was_stopped_are_errors():
    """Whether they were sent before or after, and whether the engines had met."""
    made, done, late = Pair(NETS["tcp"], 64), Done(), Done()
    address = made.target.main_address
    stranger = TransferEngine(NETS["tcp"], connect_limit_s=0.3)
    made.target.submit_bouncing_recvs(8000, 64, lambda message: None)
    send(made, b"hello")
    for _ in range(100):
        made.source.submit_send(address, bytes(8000), done)
    made.target.stop()
    for sender in (made.source, stranger):
        sender.submit_send(address, b"too late", late)
        sender.stop()
    assert None not in late.wait(2)
    done.wait(100)


def test_a_message_over_shm_to_a_peer_that_is_dead_is_refused():
    with source_and_peer(*ALL_NETS["shm"]) as (source, peer):
        assert source.write_once(peer.descriptor) is None
        address = DomainAddress.from_text(peer.ask("address"))
        peer.signal(signal.SIGKILL)
        wait_until(lambda: source.told)
        done = Done()
        source.engine.submit_send(address, b"hello", done)
        assert "send: engine " in str(done.wait()[0])
        assert "is dead: it has ended" in str(done.errors[0])


@pytest.mark.parametrize("num_bytes", [7999, 8000, 8001, 16000, 100_003, 5 << 20])
def test_long_messages_travel_in_pieces_and_arrive_whole(tcp, num_bytes):
    messages, done = list[bytes](), Done()
    tcp.target.submit_bouncing_recvs(5 << 20, 8, lambda message: messages.append(bytes(message)))
    sent = [random.Random(number).randbytes(num_bytes) for number in range(3)]
    for payload in sent:
        tcp.source.submit_send(tcp.target.main_address, payload, done)
    assert done.wait(3) == [None] * 3
    wait_until(lambda: len(messages) == 3)
    assert sorted(messages) == sorted(sent)


def test_long_messages_that_are_not_taken_are_errors(tcp):
    """One that is too large, and those for which no buffer is left."""
    kept, done = list[memoryview](), Done()
    tcp.target.submit_bouncing_recvs(100_000, 2, lambda message: kept.append(message[:]))
    with pytest.raises(TransferError, match="larger than the peer's receive buffers of 100000 bytes"):
        send(tcp, bytes(100_001))
    for _ in range(4):
        tcp.source.submit_send(tcp.target.main_address, bytes(100_000), done)
    errors = done.wait(4)
    assert errors.count(None) == 2
    assert all(EXHAUSTED in str(error) for error in errors if error)
    wait_until(lambda: len(kept) == 2)  # a callback may come behind the answer
    kept.clear()
    send_once_there_is_room(tcp, bytes(100_000))


def test_many_messages_do_not_stand_before_what_engines_say_of_themselves(tcp):
    """A write to memory that is not known yet is asked for while thousands of messages wait."""
    tcp.target.submit_bouncing_recvs(8000, 60_000, lambda message: None)
    done, flag = DoneCounter(), DoneFlag()
    for _ in range(4000):
        tcp.source.submit_send(tcp.target.main_address, bytes(8000), done)
    tcp.source.submit_write(tcp.src, tcp.dst, 8, on_done=flag)
    flag.wait(LIMIT_S)
    before = done.done
    done.wait(4000, LIMIT_S)
    assert before < 4000


def test_messages_that_are_lent_outlive_their_engine():
    made, kept = Pair(NETS["tcp"]), []
    made.target.submit_bouncing_recvs(100, 1, lambda message: kept.append(message[:]))
    send(made, b"still here")
    wait_until(lambda: kept)
    made.stop()
    del made
    assert bytes(kept[0]) == b"still here"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 1), "receive buffers of 0 bytes; wanted 1 to 1073741824"),
        ((1 << 31, 1), "receive buffers of 2147483648 bytes; wanted 1 to 1073741824"),
        ((1, 0), "0 receive buffers; wanted 1 to 65536"),
        ((1, 1 << 20), "1048576 receive buffers; wanted 1 to 65536"),
        ((1, -1), "wanted whole numbers from 0 to 2^64 - 1, got 1, -1, "),
    ],
)
def test_bad_buffers_are_refused(tcp, arguments: Any, said: str):
    with pytest.raises(BadInput) as error:
        tcp.target.submit_bouncing_recvs(*arguments, lambda message: None)
    assert said in str(error.value)
    tcp.target.submit_bouncing_recvs(1, 1, lambda message: None)
    with pytest.raises(BadInput, match="the engine has receive buffers already"):
        tcp.target.submit_bouncing_recvs(1, 1, lambda message: None)
