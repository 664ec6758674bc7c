"""Python's objects in an engine: owners that hold it, and callbacks that raise, block, fork and drop it.

Each program here aborted, hung or stalled before the rule of csrc/fabric/rule.hpp, so each has a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from fabric_pairs import LIMIT_S

from tests.paths import TESTS

BEGIN = """
import faulthandler, os, random, sys, threading, time
sys.path.insert(0, TESTS)
import torch
from fabric_pairs import LIMIT_S, LOOPBACK, Done, Pair, engine
from tracekern.errors import BadInput
from tracekern.fabric import DoneCounter, DoneFlag
faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True)
torch.set_num_threads(1)
"""


def run(program: str, timeout_s: float = 4 * LIMIT_S) -> str:
    """Runs it behind BEGIN. Returns what it printed; asserts that it ended well, and said nothing else."""
    code = BEGIN.replace("TESTS", repr(str(TESTS))) + program
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_the_owner_of_memory_may_hold_the_engine():
    """The callback thread lets go of the engine, and ends it without waiting for itself."""
    assert (
        run("""
class Pool:
    ended = 0
    def __init__(self):
        self.engine, self.memory = engine([LOOPBACK]), torch.zeros(4096, dtype=torch.uint8)
    def __del__(self):
        Pool.ended += 1

def use():
    pool = Pool()
    handle, _ = pool.engine.register_memory(pool.memory.data_ptr(), 4096, owner=pool)
    pool.engine.unregister_memory(handle)

for _ in range(100):
    use()
until = time.monotonic() + LIMIT_S
while Pool.ended < 100 and time.monotonic() < until:
    time.sleep(0.01)
print(Pool.ended)
""")
        == "100\n"
    )


def test_the_end_of_a_callback_may_use_the_engine():
    """One of an immediate, and the one for all others, while another thread asks for a counter."""
    assert (
        run("""
made = engine([LOOPBACK])
class Request:
    def __init__(self, imm):
        self.imm, self.counter = imm, made.make_imm_counter(imm + 1000)
    def __call__(self, *_):
        pass
    def __del__(self):
        time.sleep(0.05)  # other threads of Python run meanwhile
        made.remove_imm_count(self.imm + 1000)
        ended.release()

ended = threading.Semaphore(0)
made.set_imm_count_expected(7, 5, Request(7))
made.set_imm_callback(Request(8))
other = threading.Thread(target=lambda: [made.make_imm_counter(imm) for imm in range(100, 200)])
other.start()
print(made.remove_imm_count(7))
made.set_imm_callback(lambda imm: None)
other.join()
print(ended.acquire(timeout=LIMIT_S), ended.acquire(timeout=LIMIT_S))
made.make_imm_counter(1007)
made.stop()
""")
        == "(0, 5)\nTrue True\n"
    )


def test_threads_that_set_callbacks_register_and_submit_do_not_wait_for_each_other():
    assert (
        run("""
made = Pair([LOOPBACK], 4096)
counts, is_over, errors = [0, 0, 0], threading.Event(), []
def callbacks():
    made.source.set_peer_callback(lambda what: None)
def register():
    handle, _ = made.source.register_tensor(torch.zeros(64, dtype=torch.uint8))
    made.source.unregister_memory(handle)
def submit():
    made.source.submit_imm(made.dst, 3, on_done=lambda error: error and errors.append(error))
    time.sleep(0.0002)
def repeat(number, act):
    while not is_over.is_set():
        act()
        counts[number] += 1
threads = [threading.Thread(target=repeat, args=one) for one in enumerate((callbacks, register, submit))]
for thread in threads:
    thread.start()
time.sleep(2)
is_over.set()
for thread in threads:
    thread.join()
made.stop()
print(min(counts) > 20, errors)
""")
        == "True []\n"
    )


ENDS = {
    "transfers": "made.source.submit_write(made.src, made.dst, 1 << 26, imm=1, on_done=lambda error: None)",
    "messages": "made.source.submit_send(made.target.main_address, bytes(1 << 20), lambda error: None)",
    "callbacks": "made.source.submit_imm(made.dst, 1, lambda error: time.sleep(0.05))",
    "a watched word": "made.source.alloc_scalar_watcher(lambda old, now: time.sleep(0.2) or True).tensor.fill_(1)",
}


@pytest.mark.parametrize("what", ENDS)
def test_an_interpreter_may_exit_with_work_under_way(what):
    assert run(f"made = Pair([LOOPBACK], 1 << 26)\nfor _ in range(20):\n    {ENDS[what]}\nprint('end')\n") == "end\n"


def test_an_interpreter_exits_though_a_callback_never_returns():
    program = (
        "import tracekern.fabric.engine as module\nmodule._AT_EXIT_S = 0.5\nmade = Pair([LOOPBACK], 64)\n"
        "made.source.submit_imm(made.dst, 1, lambda error: threading.Event().wait())\ntime.sleep(0.2)\n"
    )
    code = BEGIN.replace("TESTS", repr(str(TESTS))) + program
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0
    assert "a callback of a TransferEngine has not returned; the process ends without it" in done.stderr


def test_a_callback_may_raise_and_fork():
    """A child neither calls nor ends what is its parent's, and takes nothing that comes for it."""
    assert (
        run("""
made, done, children = Pair([LOOPBACK], 1 << 20), Done(), []
counter, flag = made.target.make_imm_counter(2), DoneFlag()
def fork(error):
    child = os.fork()
    if child == 0:
        said = []
        for wait in (lambda: counter.wait(1, 5), lambda: flag.wait(5)):
            try:
                wait()
            except BadInput as refused:
                said.append("was made before this process was forked" in str(refused))
        os._exit(said != [True, True])
    children.append(child)
    done(error)
for _ in range(10):
    made.source.submit_write(made.src, made.dst, 1 << 20, imm=2, on_done=fork)
print(done.wait(10))
counter.wait(10, LIMIT_S)
print([os.waitpid(child, 0)[1] for child in children])
made.stop()
""")
        == f"{[None] * 10}\n{[0] * 10}\n"
    )


MANY = """
import gc, logging
import tracekern.fabric.engine as module
logging.disable()  # engines that are dropped are dead to others
sys.unraisablehook = lambda raised: None  # of callbacks that do
chance, children = random.Random(NUMBER), []

class Owner:
    def __init__(self, *kept):
        self.kept = kept
    def __del__(self):
        if chance.random() < 0.5:
            self.kept[0].remove_imm_count(7)

def callback(pair, number):
    def fork(*_):
        child = os.fork()
        if child == 0:
            os._exit(0)
        children.append(child)
    def block(*_):
        time.sleep(chance.random() / 50)
    def fail(*_):
        raise ValueError
    def drop(*_):
        pair.clear()
    def stop(*_):  # not both: callbacks that stop each other's engines wait for each other
        if pair:
            pair[number].stop()
    return chance.choices((fork, block, fail, drop, stop, lambda *_: None), (1, 5, 5, 5, 2, 10))[0]

def use():
    pair = [engine([LOOPBACK]), engine([LOOPBACK])]
    source, target = pair
    memory = torch.ones(64)
    owner = Owner(chance.choice(pair), memory) if chance.random() < 0.7 else memory
    src, _ = source.register_memory(memory.data_ptr(), 256, owner)
    _, dst = target.register_memory(memory.data_ptr(), 256, Owner(target))
    for act in (
        lambda: source.set_peer_callback(callback(pair, 0)),
        lambda: target.set_imm_callback(callback(pair, 1)),
        lambda: target.set_imm_count_expected(7, 2, callback(pair, 1)),
        lambda: target.submit_bouncing_recvs(64, 4, callback(pair, 1)),
        lambda: source.submit_send(target.main_address, b"hello", callback(pair, 0)),
        lambda: source.submit_write(src, dst, 64, imm=7, on_done=callback(pair, 0)),
        lambda: source.submit_imm(dst, 8, on_done=callback(pair, 0)),
        lambda: source.alloc_scalar_watcher(callback(pair, 0)).tensor.fill_(1),
        lambda: source.unregister_memory(src, timeout_s=5),
        lambda: chance.random() < 0.2 and target.stop(),
    ):
        try:
            if chance.random() < 0.7:
                act()
        except (BadInput, TransferError):
            pass  # stopped by a callback
    for made in (source, target) if chance.random() < 0.9 else ():  # owners hold the others, which end with the process
        made.stop()

for _ in range(NUMBER // 2):
    use()
gc.collect()
for child in children:
    assert os.waitpid(child, 0)[1] == 0
module._stop_all()
assert module.native().have_callbacks_ended(LIMIT_S)
print(len(os.listdir("/proc/self/task")) < 10)
"""


@pytest.mark.parametrize("number", [60, pytest.param(10_000, marks=pytest.mark.soak)])
def test_engines_with_owners_and_callbacks_of_all_kinds_are_opened_and_closed(number):
    program = MANY.replace("NUMBER", str(number))
    program = "from tracekern.fabric import TransferError\nfaulthandler.cancel_dump_traceback_later()\n" + program
    assert run(program, timeout_s=3000) == "True\n"
