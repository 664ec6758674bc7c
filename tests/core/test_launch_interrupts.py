"""Ctrl-C on our own launcher: once, and again while it ends its ranks."""

from __future__ import annotations

import signal
import subprocess

from test_launch import Program, program  # noqa: F401, the second is a fixture


def test_ctrl_c_reaches_every_rank(program: Program):  # noqa: F811
    text = """
        import os, time
        try: print("ready", flush=True); time.sleep(600)
        except KeyboardInterrupt: time.sleep(0.3); print("interrupted", flush=True); raise SystemExit(7)
        """
    launcher = subprocess.Popen(program.launcher(2, text), stdout=subprocess.PIPE, text=True)
    seen = [launcher.stdout.readline() for _ in range(2)]
    assert all("ready" in line for line in seen)
    launcher.send_signal(signal.SIGINT)
    rest = launcher.stdout.read()
    assert launcher.wait(timeout=60) == 0
    assert rest.count("interrupted") == 2
    assert "[7, 7]" in rest


def test_a_second_ctrl_c_leaves_no_rank_behind(program: Program):  # noqa: F811
    """While those that hear neither the first nor SIGTERM have their last seconds."""
    text = """
        import signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: print("stays", flush=True))
        print("ready", flush=True)
        time.sleep(600)
        """
    launcher = subprocess.Popen(program.launcher(1, text, ", kill_after_s=0"), stdout=subprocess.PIPE, text=True)
    line = ""
    for said in ("ready", "stays"):
        line = launcher.stdout.readline()
        if "[-9]" in line:  # on a busy machine its last seconds may be over before it can say anything
            break
        assert said in line
        launcher.send_signal(signal.SIGINT)
    assert "[-9]" in line + launcher.stdout.read()
    assert launcher.wait(timeout=60) == 0
