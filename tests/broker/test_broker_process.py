"""The broker as a process: it starts, says so, and ends in each of the ways a process can end."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from request_samples import codes_in, sample_request

import semel
from semel.broker.process import Broker
from semel.errors import BrokerUnreachable, ConfigError, InvalidState, RequestTimedOut
from semel.testing.exchange import exchange
from semel.wire.api import Api
from semel.wire.messages import build, response_type_for

COMMAND = [sys.executable, "-m", "semel.broker", "--port", "0"]

STARTS_AND_WAITS = """
import time
from semel.broker.process import Broker
broker = Broker()
broker.start()
print(broker.process_id, broker.data.parent, flush=True)
time.sleep(600)
"""


def address(broker: Broker) -> tuple[str, int]:
    host, _, port = broker.bootstrap.rpartition(":")
    return host, int(port)


def topic_names(broker: Broker) -> set[str]:
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        return set(admin.list_topics())


def create(broker: Broker, name: str) -> None:
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics(name)


@pytest.fixture(scope="module")
def shared() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


def is_gone(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def test_it_says_one_line_when_it_is_ready_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    """Scripts wait for that line; the next start finds a directory that was closed."""
    with subprocess.Popen([*COMMAND, "--data", str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = re.fullmatch(r"semel broker ready on 127\.0\.0\.1:(\d+)\n", line)
        assert port is not None
        request = sample_request(Api.API_VERSIONS, 3)
        answer = exchange(("127.0.0.1", int(port[1])), request, response_type_for(request))
        assert set(codes_in(answer)) == {ErrorCode.none}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout.read() == ""
    assert (tmp_path / ".semel-clean-shutdown").exists()


def test_a_killed_broker_is_back_at_the_same_port_with_its_topics() -> None:
    """kill -9 and a start again: clients find it where it was."""
    with Broker() as broker:
        create(broker, "kept")
        bootstrap, first = broker.bootstrap, broker.process_id
        broker.kill()
        assert is_gone(first)
        with pytest.raises(InvalidState, match="not running"):
            _ = broker.process_id
        broker.restart()
        assert (broker.bootstrap, broker.process_id != first) == (bootstrap, True)
        assert "kept" in topic_names(broker)
        broker.restart()  # from running: stopped cleanly first
        assert "kept" in topic_names(broker)


def test_a_temporary_folder_goes_with_the_broker_and_a_given_one_stays(tmp_path: Path) -> None:
    """Nothing is left behind that nobody asked to keep."""
    with Broker() as broker:
        folder = broker.data.parent
        assert broker.log_path.exists()
    assert not folder.exists()
    with Broker(data=tmp_path / "mine") as broker:
        create(broker, "kept")
        log_folder = broker.log_path.parent
    assert not log_folder.exists()
    with Broker(data=tmp_path / "mine") as broker:
        assert "kept" in topic_names(broker)


def test_a_paused_broker_answers_when_it_goes_on(shared: Broker) -> None:
    """SIGSTOP: connections are taken by the kernel, answers wait."""
    request = sample_request(Api.API_VERSIONS, 3)
    shared.pause()
    try:
        with pytest.raises(RequestTimedOut):
            exchange(address(shared), request, response_type_for(request), timeout_s=0.3)
    finally:
        shared.resume()
    assert set(codes_in(exchange(address(shared), request, response_type_for(request)))) == {ErrorCode.none}


def test_a_paused_broker_can_be_stopped() -> None:
    """A process that stands still sees no SIGTERM; it is woken for it."""
    with Broker() as broker:
        process_id = broker.process_id
        broker.pause()
        broker.stop()
        assert is_gone(process_id)
        assert (broker.data / ".semel-clean-shutdown").exists()


def test_settings_reach_the_broker() -> None:
    """Kafka's names, and Python's values for them."""
    with Broker(config={"num.partitions": 3, "auto.create.topics.enable": True}, fsync="never") as broker:
        request = build(Api.METADATA, 4, topics=[{"name": "by-itself"}], allow_auto_topic_creation=True)
        answer: Any = exchange(address(broker), request, response_type_for(request))
        assert len(answer.topics[0].partitions) == 3


def test_a_port_in_use_is_told_in_one_sentence(shared: Broker, tmp_path: Path) -> None:
    """Code 1, and no traceback."""
    port = shared.bootstrap.rpartition(":")[2]
    command = [*COMMAND[:-1], port, "--data", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"semel broker cannot start: Port {port} of 127.0.0.1 is in use")
    assert done.stderr.count("\n") == 1


def test_a_directory_that_cannot_be_written_is_told_in_one_sentence(tmp_path: Path) -> None:
    """A file stands where the directory should be; rights would not keep root out."""
    (tmp_path / "file").write_text("")
    command = [*COMMAND, "--data", str(tmp_path / "file" / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("semel broker cannot start: The data directory")
    assert done.stderr.count("\n") == 1


def test_a_second_broker_on_the_same_directory_is_refused(shared: Broker) -> None:
    """Two would destroy each other's records. The child's own words reach the caller."""
    second = Broker(data=shared.data)
    with pytest.raises(BrokerUnreachable, match=rf"in use by process {shared.process_id}"):
        second.start()
    assert not second.is_running
    second.close()
    assert "Traceback" not in shared.log_path.read_text()


def test_a_broker_that_is_not_ready_in_time_is_ended() -> None:
    """The caller gets an error, and no process is left."""
    broker = Broker(start_timeout_s=0.0)
    with pytest.raises(BrokerUnreachable, match="not ready within 0 s"):
        broker.start()
    assert not broker.is_running
    broker.close()


def test_a_wrong_setting_is_told_by_the_error() -> None:
    """What the child said on standard error is in the exception."""
    broker = Broker(config={"num.partitions": "many"})
    folder = broker.data.parent
    with pytest.raises(BrokerUnreachable, match=r"Invalid value many for configuration num\.partitions"):
        broker.__enter__()
    assert not folder.exists()
    with pytest.raises(ConfigError, match="one or the other"):
        Broker(port=9092, arguments=["--listener", "PLAINTEXT://127.0.0.1:0"])


def test_it_ends_with_its_parent_even_when_that_is_killed() -> None:
    """SIGKILL gives the parent no chance to end anything; the broker is gone all the same."""
    with subprocess.Popen([sys.executable, "-c", STARTS_AND_WAITS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[0])
        assert not is_gone(child)
        os.kill(parent.pid, signal.SIGKILL)
    pidfd = _open_process(child)
    if pidfd is not None:
        readable, _, _ = select.select([pidfd], [], [], 30)
        os.close(pidfd)
        assert readable
    assert is_gone(child)


def _open_process(process_id: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it already has."""
    try:
        return os.pidfd_open(process_id)
    except ProcessLookupError:
        return None


@pytest.mark.parametrize("is_paused", [False, True])
def test_its_temporary_folder_goes_when_its_parent_is_killed(is_paused: bool) -> None:
    """Neither the parent nor the broker can remove it then. A broker that stands still makes no difference."""
    parent = subprocess.Popen([sys.executable, "-c", STARTS_AND_WAITS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process_id, _, folder = parent.stdout.readline().strip().partition(" ")
    assert Path(folder).is_dir()
    if is_paused:
        os.kill(int(process_id), signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 20
    while Path(folder).exists():
        assert time.monotonic() < until, "the folder is still there"
        time.sleep(0.01)


def test_a_forgotten_broker_is_ended_when_it_is_collected() -> None:
    """Without `with` and without close: no process and no folder stay."""
    broker = Broker()
    broker.start()
    process_id, folder = broker.process_id, broker.data.parent
    del broker
    gc.collect()
    assert is_gone(process_id)
    assert not folder.exists()


def test_it_is_small_when_idle(shared: Broker) -> None:
    """The bar is about 40 MB; beyond 60 something heavy has been imported by accident."""
    status = Path(f"/proc/{shared.process_id}/status").read_text()
    resident_kib = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert resident_kib is not None
    assert int(resident_kib[1]) < 60 * 1024


def test_a_stranger_on_the_port_does_not_disturb_it(shared: Broker) -> None:
    """Bytes that are no request close that connection only."""
    with socket.create_connection(address(shared), timeout=30) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1) == b""
    request = sample_request(Api.API_VERSIONS, 3)
    assert set(codes_in(exchange(address(shared), request, response_type_for(request)))) == {ErrorCode.none}
