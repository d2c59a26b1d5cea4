"""SignalWatch with real signals, most of them from one Python to another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from dist_ckpt.errors import SettingError
from dist_ckpt.signals import SignalWatch

NAMES = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {name: signal.getsignal(name) for name in NAMES}
    yield
    assert {name: signal.getsignal(name) for name in NAMES} == before


@pytest.fixture
def watch() -> Iterator[SignalWatch]:
    watch = SignalWatch()
    watch.install()
    yield watch
    watch.uninstall()


def start(script: str, **options: Any) -> subprocess.Popen[str]:
    """Start a Python that prints "ready" when it may be struck."""
    child = subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n", child.communicate(timeout=10)
    return child


def finish(child: subprocess.Popen[str]) -> Any:
    # Not communicate(): it would miss what readline has read ahead.
    assert child.stdout is not None
    assert child.stderr is not None
    with child, child.stdout as out, child.stderr as err:
        told, complaint = out.read(), err.read()
    assert child.returncode == 0, complaint
    return json.loads(told)


HEAD = """
import json, os, signal, sys, threading, time
from dist_ckpt.signals import SignalWatch
watch = SignalWatch()
def ready():
    print("ready", flush=True)
def until(done, secs=10.0):
    end = time.monotonic() + secs
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.002)
    return False
"""


def test_nothing_is_noted_when_nothing_came(watch: SignalWatch) -> None:
    assert (watch.stop_signal, watch.stop_time, watch.take_usr1()) == (0, None, 0)


def test_the_first_stop_signal_is_kept_with_its_time(watch: SignalWatch) -> None:
    begun = time.monotonic()
    signal.raise_signal(signal.SIGTERM)
    first = watch.stop_time
    signal.raise_signal(signal.SIGINT)
    assert watch.stop_signal == signal.SIGTERM
    assert first is not None
    assert begun <= first <= time.monotonic()
    assert watch.stop_time == first


def test_each_usr1_is_taken_once(watch: SignalWatch) -> None:
    for _ in range(3):
        signal.raise_signal(signal.SIGUSR1)
    assert watch.take_usr1() == 3
    assert watch.take_usr1() == 0
    signal.raise_signal(signal.SIGUSR1)
    assert watch.take_usr1() == 1
    assert watch.stop_signal == 0


def test_handlers_of_the_program_are_called_too_and_come_back() -> None:
    called: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        called.append(number)

    before = {name: signal.signal(name, mine) for name in NAMES}
    try:
        watch = SignalWatch()
        watch.install()
        watch.install()
        for name in NAMES:
            signal.raise_signal(name)
        assert called == list(NAMES)
        assert watch.stop_signal == signal.SIGTERM
        assert watch.take_usr1() == 1
        watch.uninstall()
        watch.uninstall()
        assert [signal.getsignal(name) for name in NAMES] == [mine] * 3
        signal.raise_signal(signal.SIGUSR1)
        assert called[3:] == [signal.SIGUSR1]
        assert watch.take_usr1() == 0
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def test_a_handler_that_the_program_set_later_stays(watch: SignalWatch) -> None:
    ours = signal.getsignal(signal.SIGUSR1)
    later = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert later == ours
    watch.uninstall()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_only_the_wanted_signals_are_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    watch = SignalWatch([signal.SIGUSR1])
    watch.install()
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    watch.uninstall()


def test_a_signal_that_nobody_can_watch_is_refused() -> None:
    with pytest.raises(SettingError, match="only SIGTERM, SIGINT and SIGUSR1") as caught:
        SignalWatch([signal.SIGKILL])
    assert caught.value.found == [9]


def test_the_second_sigint_interrupts_at_once_and_the_third_finds_the_old_handler() -> None:
    watch = SignalWatch()
    before = signal.getsignal(signal.SIGINT)
    watch.install()
    signal.raise_signal(signal.SIGINT)
    assert watch.stop_signal == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    watch.uninstall()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_sigint_after_a_sigterm_is_the_first_of_its_kind(watch: SignalWatch) -> None:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert watch.stop_signal == signal.SIGTERM


def test_from_another_thread_it_warns_and_does_nothing() -> None:
    watch = SignalWatch()
    before = [signal.getsignal(name) for name in NAMES]

    def work() -> None:
        with pytest.warns(RuntimeWarning, match="from thread 'side'"):
            watch.install()
        watch.uninstall()  # nothing was installed: nothing to warn about

    side = threading.Thread(target=work, name="side")
    side.start()
    side.join()
    assert [signal.getsignal(name) for name in NAMES] == before


def test_uninstalling_from_another_thread_warns_and_keeps_watching(watch: SignalWatch) -> None:
    seen: list[bool] = []

    def work() -> None:
        with pytest.warns(RuntimeWarning, match="given back"):
            watch.uninstall()
        seen.append(True)

    side = threading.Thread(target=work)
    side.start()
    side.join()
    signal.raise_signal(signal.SIGUSR1)
    assert (seen, watch.take_usr1()) == ([True], 1)


def test_a_thousand_usr1_from_another_process_are_all_answered() -> None:
    """Case 28: signals at any instant; none hangs, and after the last one there is an answer.

    Each is sent once the one before was taken, so that the kernel can't merge any: all are counted.
    """
    child = start("""
        watch.install()
        taken = 0
        ready()
        while taken < 1000:
            new = watch.take_usr1()
            if new:
                taken += new
                print(taken, flush=True)
        print(json.dumps(taken + watch.take_usr1()))
    """)
    assert child.stdout is not None
    for sent in range(1, 1001):
        child.send_signal(signal.SIGUSR1)
        assert child.stdout.readline() == f"{sent}\n"
    assert finish(child) == 1000


def test_a_flood_of_usr1_neither_hangs_nor_loses_the_last_one() -> None:
    """Case 28: the kernel merges equal pending signals, so counts may fall short; answers don't."""
    child = start(
        """
        watch.install()
        ready()
        taken = []
        while watch.stop_signal == 0:
            taken.append(watch.take_usr1())
        last = sys.stdin.readline().strip()
        answered = until(lambda: watch.take_usr1() > 0)
        print(json.dumps([sum(taken), answered, last]))
    """,
        stdin=subprocess.PIPE,
    )
    for _ in range(1000):
        child.send_signal(signal.SIGUSR1)
    time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    assert child.stdin is not None
    child.stdin.write("last\n")
    child.stdin.flush()
    child.send_signal(signal.SIGUSR1)
    total, answered, last = finish(child)
    assert 1 <= total <= 1000
    assert (answered, last) == (True, "last")


def test_a_stop_during_a_long_native_call_is_noted_when_it_returns() -> None:
    """The call holds the main thread and doesn't come back for signals, as a collective does."""
    child = start("""
        import hashlib
        watch.install()
        data = bytes(2**28)
        ready()
        begun = time.monotonic()
        hashlib.sha256(data).digest()
        spent = time.monotonic() - begun
        print(json.dumps([until(lambda: watch.stop_signal != 0), watch.stop_signal, spent]))
    """)
    time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    noted, number, spent = finish(child)
    assert (noted, number) == (True, signal.SIGTERM)
    assert spent > 0.05  # it was native, and long


def test_a_sigint_that_was_ignored_at_start_stays_ignored() -> None:
    """Shells start background jobs that way, and nohup; a Ctrl-C for another job isn't for them."""
    child = start(
        """
        watch.install()
        ready()
        until(lambda: watch.stop_signal != 0)
        print(json.dumps([watch.stop_signal, signal.getsignal(signal.SIGINT) == signal.SIG_IGN]))
        """,
        preexec_fn=ignore_signals,
    )
    child.send_signal(signal.SIGINT)
    time.sleep(0.1)
    child.send_signal(signal.SIGTERM)  # ignored at start as well, and noted all the same
    assert finish(child) == [signal.SIGTERM, True]


def ignore_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_a_second_sigint_from_outside_ends_a_program_that_doesnt_come_to_its_boundary() -> None:
    child = start("""
        watch.install()
        ready()
        assert until(lambda: watch.stop_signal == signal.SIGINT)
        ready()
        time.sleep(30)
    """)
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    begun = time.monotonic()
    _, err = child.communicate(timeout=20)
    assert time.monotonic() - begun < 5
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err


def test_a_forked_child_behaves_as_if_nobody_watched() -> None:
    """A loader's worker inherits the handlers: SIGTERM still ends it, SIGUSR1 leaves it alone."""
    child = start("""
        watch.install()
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(3)
        time.sleep(0.1)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        early = os.waitpid(pid, os.WNOHANG)[0]
        os.kill(pid, signal.SIGTERM)
        status = os.waitpid(pid, 0)[1]
        ready()
        print(json.dumps([early, os.WTERMSIG(status), watch.stop_signal, watch.take_usr1()]))
    """)
    assert finish(child) == [0, signal.SIGTERM, 0, 0]


def test_faulthandler_works_beside_it() -> None:
    child = start("""
        import faulthandler, tempfile
        log = tempfile.TemporaryFile("w+")
        faulthandler.enable(log)
        watch.install()
        faulthandler.register(signal.SIGUSR1, log, chain=True)
        ready()
        noted = until(lambda: watch.take_usr1() > 0)
        log.seek(0)
        print(json.dumps([noted, "most recent call first" in log.read()]))
    """)
    child.send_signal(signal.SIGUSR1)
    assert finish(child) == [True, True]


def test_signals_from_a_process_reach_this_one(watch: SignalWatch) -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getppid(), signal.SIGUSR1)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    deadline = time.monotonic() + 5
    while watch.stop_signal == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert (watch.stop_signal, watch.take_usr1()) == (signal.SIGTERM, 1)
