"""`semel ui` and `semel broker --ui` as processes, as a user starts them."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import semel
from semel.broker.arguments import parse_arguments
from semel.broker.process import Broker
from semel.cli.main import app
from semel.errors import ConfigError

SEMEL = [sys.executable, "-c", "from semel.cli.entry import main; main()"]


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process and the lines that it prints until it has listened."""
    process = subprocess.Popen([*SEMEL, "ui", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        yield process, [process.stdout.readline()]
    finally:
        process.kill()
        process.communicate()


def get(url: str, path: str = "/") -> tuple[int, str]:
    found = re.search(r"http://([\d.]+):(\d+)/", url)
    assert found is not None, url
    host = "127.0.0.1" if found[1] == "0.0.0.0" else found[1]
    connection = http.client.HTTPConnection(host, int(found[2]), timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_command_serves_until_ctrl_c(semel_broker: Broker) -> None:
    """It says where, answers, and ends with the status of the other commands."""
    with started("--bootstrap", semel_broker.bootstrap, "--port", "0") as (process, [ready]):
        status, text = get(ready)
        assert (status, semel_broker.bootstrap in text) == (200, True)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_beyond_loopback_a_token_is_printed_and_asked_for(semel_broker: Broker) -> None:
    """Nobody is let in without."""
    with started("--bootstrap", semel_broker.bootstrap, "--port", "0", "--host", "0.0.0.0") as (process, [ready]):
        assert process.stdout is not None
        assert re.search(r"token.*: [\w-]{32}\n$", process.stdout.readline())
        assert "not encrypted" in process.stdout.readline()
        assert get(ready)[0] == 303
        assert "Password" in get(ready, "/login")[1]


def test_a_broker_with_a_page_starts_and_ends_it(tmp_path: Path) -> None:
    """`semel broker --ui`: about this broker, and gone with it."""
    with semel.Broker(data=tmp_path, arguments=["--ui", "0"]) as broker:
        deadline = time.monotonic() + 60
        while not (ready := re.search(r"semel ui ready on http://\S+", broker.log_path.read_text())):
            assert time.monotonic() < deadline, broker.log_path.read_text()
            time.sleep(0.1)
        status, text = get(ready[0])
        assert (status, broker.bootstrap in text) == (200, True)
    with pytest.raises(ConnectionRefusedError):
        get(ready[0])


def test_a_broker_that_asks_everybody_for_a_login_refuses_a_page(tmp_path: Path) -> None:
    """The page would have none."""
    users = tmp_path / "users"
    users.touch(mode=0o600)
    users.write_text("ann=secret")
    with pytest.raises(ConfigError, match="has no login"):
        parse_arguments(["--ui", "--listener", "SASL_PLAINTEXT://127.0.0.1:0", "--users", str(users)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tls-key", "key.pem"], "without its certificate"),
        (["--tls-certificate", "gone.pem"], "cannot be read"),
        (["--tls-certificate", "/dev/null", "--port", "0"], "cannot be used with its key"),
        (["--reports", "gone"], "is no folder"),
        (["--password-file", "gone"], "cannot be read"),
        (["--host", "203.0.113.77", "--port", "0"], "cannot listen"),
    ],
)
def test_wrong_use_is_one_sentence(arguments: list[str], said: str) -> None:
    """Exit code 2, and nothing was started."""
    result = CliRunner().invoke(app, ["ui", "--bootstrap", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_password_file_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    """As the broker's users file is."""
    path = tmp_path / "password"
    path.write_text("open sesame")
    os.chmod(path, 0o644)
    result = CliRunner().invoke(app, ["ui", "--bootstrap", "127.0.0.1:1", "--password-file", str(path)])
    assert (result.exit_code, "chmod 600" in result.stderr) == (2, True)
