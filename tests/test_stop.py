"""Signals become one flag; the second SIGINT and the end of the grace time do not wait."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from jobrunner.stop import SIGNALS, Stop


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_sets_the_flag_and_nothing_else(signum):
    stop = Stop()
    before = signal.getsignal(signum)
    with stop.on_signals(grace_s=60):
        os.kill(os.getpid(), signum)
        assert stop.wait(5)
    assert stop.requested
    assert stop.reason == signal.Signals(signum).name
    assert signal.getsignal(signum) is before


def test_no_signal_no_stop():
    stop = Stop()
    with stop.on_signals(grace_s=60):
        pass
    assert not stop.requested


def test_a_second_sigint_interrupts():
    stop = Stop()
    with stop.on_signals(grace_s=60):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_work_longer_than_the_grace_time_is_cut_off_with_75():
    code = """
        import os, signal, time
        from jobrunner.stop import Stop
        with Stop().on_signals(grace_s=0.2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 75
    assert "grace time of 0.2 s" in done.stderr


def test_the_grace_time_runs_while_a_library_is_busy():
    """One call that returns only after a minute; Python's handlers run after it, not during."""
    code = """
        import hashlib, os
        from jobrunner.stop import Stop
        with Stop().on_signals(grace_s=0.2):
            os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 0.3; kill -TERM {os.getpid()}"], {})
            hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 75
    assert "grace time of 0.2 s" in done.stderr


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = Stop()
    try:
        with stop.on_signals(grace_s=60):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.wait(0.05)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
