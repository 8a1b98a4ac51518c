"""SIGTERM ends a session in order, and a static member is back at work at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from session_scene import BROKER_CONFIG, Pipeline, copy_all, wait_until

from semel.session import sigterm
from semel.session.sigterm import SigtermWatch
from semel.testing.embedded import EmbeddedBroker

PROGRAM = Path(__file__).parent / "sigterm_worker.py"


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


def start(pipeline: Pipeline, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), how, pipeline.bootstrap, pipeline.group, pipeline.source, pipeline.target]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def terminate(worker: subprocess.Popen[str]) -> tuple[int, str]:
    worker.send_signal(signal.SIGTERM)
    output, _ = worker.communicate(timeout=30)
    return worker.returncode, output


@pytest.mark.parametrize("how", ["run", "loop", "turns", "asyncio", "own handler"])
def test_sigterm_commits_leaves_and_exits(broker: EmbeddedBroker, how: str) -> None:
    """With the status of a process that SIGTERM has ended, or as the program's own handler wants it."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(20))
    worker = start(pipeline, how)
    wait_until(lambda: len(pipeline.counts()) == 20, "all records")
    status, output = terminate(worker)
    assert "Traceback" not in output
    assert status == (0 if how == "own handler" else 128 + signal.SIGTERM), output
    assert ("ended by itself" in output) == (how == "own handler")
    assert pipeline.open_transactions() == []
    assert pipeline.counts() == Counter(range(20))
    assert "joining" in output
    assert f"was assigned {pipeline.source}-0" in output


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_an_instance_that_is_started_again_need_not_wait(broker: EmbeddedBroker, kind: signal.Signals) -> None:
    """It waited for the session timeout of its predecessor, 44 s; here the timeout is the default too."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(20))
    worker = start(pipeline, "run")
    wait_until(lambda: bool(pipeline.counts()), "the first records")
    worker.send_signal(kind)
    worker.communicate(timeout=30)
    pipeline.write(range(20, 30))
    began = time.monotonic()
    with pipeline.session("A", session_timeout_ms=45_000) as session:
        copy_all(session, pipeline, 30 - sum(pipeline.committed().values()))
    assert time.monotonic() - began < 15
    assert pipeline.counts() == Counter(range(30))


def test_others_get_the_partitions_at_once_when_an_instance_ends_in_order(broker: EmbeddedBroker) -> None:
    """A place that nobody comes back to would be kept for the session timeout."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(10))
    with pipeline.session("A", session_timeout_ms=45_000) as first:
        copy_all(first, pipeline, 10)
    began = time.monotonic()
    pipeline.write(range(10, 20))
    with pipeline.session("B", session_timeout_ms=45_000) as second:
        copy_all(second, pipeline, 10)
    assert time.monotonic() - began < 15


def test_the_handler_is_there_only_while_a_session_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own handler is left alone, nested sessions share one, and other threads have none."""
    monkeypatch.setattr(sigterm, "_watches", [])  # sessions that earlier tests left open, as a crash does
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        check_handlers()
    finally:
        signal.signal(signal.SIGTERM, before)


def check_handlers() -> None:
    stopped: list[str] = []
    first, second = (SigtermWatch(lambda name=name: stopped.append(name)) for name in ("first", "second"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    first.start()
    second.start()
    signal.raise_signal(signal.SIGTERM)
    assert stopped == ["first", "second"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # the next one ends the process
    second.end()
    first.end()
    with pytest.raises(SystemExit) as ended:
        first.raise_exit()
    assert ended.value.code == 143

    third = SigtermWatch(lambda: None)
    thread = threading.Thread(target=third.start)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def own(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, own)
    try:
        third.start()
        third.end()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


FORKS = """
import os, signal, time
from semel.session.sigterm import SigtermWatch
watch = SigtermWatch(lambda: None)
watch.start()
readable, writable = os.pipe()
child = os.fork()
if child == 0:
    os.write(writable, b"x")
    time.sleep(30)
    os._exit(0)
os.read(readable, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.kill(os.getpid(), signal.SIGTERM)
print(watch.was_raised)
"""


def test_sigterm_ends_a_forked_worker_at_once() -> None:
    """`multiprocessing.Pool` ends its workers that way: with the session's handler in them, its end waited for ever."""
    result = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == [str(-signal.SIGTERM), "True"], result.stderr
