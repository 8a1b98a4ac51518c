"""Examples and commands of docs/capture.md as they stand there, with real addresses in place of the made-up ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from capture_scene import SETTINGS, Source, broker, server, source

from semel.testing.postgres import Postgres

__all__ = ["broker", "server", "source"]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "capture.md"
INSTALL = ROOT / "tests" / "install"


def block(language: str) -> str:
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found


def test_the_example_of_the_page_copies_a_bank(tmp_path: Path) -> None:
    """As a reader runs it: capture, inbox, and a copy that is equal."""
    setup = (INSTALL / "setups" / "capture_bank.py.txt").read_text()
    plan = [{"name": "capture.md", "code": block("python"), "setup": setup, "continues": False}]
    with Postgres(settings=SETTINGS) as server:
        done = subprocess.run(
            [sys.executable, str(INSTALL / "example_runner.py")],
            input=json.dumps(plan),
            env={**os.environ, "PGHOST": str(server.folder), "PGUSER": "postgres"},
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=180,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 events" in done.stdout


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_command_of_the_page_captures_until_it_is_stopped(
    source: Source, number: signal.Signals, status: int
) -> None:
    """Ready, then events, then Ctrl-C or SIGTERM; and the statements that clear up leave nothing behind."""
    tables = ("cash", "savings")
    source.make(*(f"CREATE TABLE {table} (id int PRIMARY KEY)" for table in tables), tables=tables)
    real = {"semel": str(Path(sys.executable).parent / "semel"), "postgresql://bank@localhost/bank": source.address}
    real |= {"127.0.0.1:9092": source.bootstrap, "bank": source.name}
    command = [real.get(word, word) for word in shlex.split(block("sh"))]
    command += ["--topic", f"{source.name}.{{table}}", "--slot", "semel_bank", "--publication", "semel_bank"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("semel capture ready: cash, savings of ")
        source.do("INSERT INTO cash VALUES (1)", "INSERT INTO savings VALUES (2)")
        while not (source.changes("cash") and source.changes("savings")):
            assert running.poll() is None
        running.send_signal(number)
        _, said = running.communicate(timeout=30)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == status, said
    drop_slot, drop_publication = block("sql").strip().split("\n")
    assert drop_slot == "SELECT pg_drop_replication_slot('semel_bank');"
    source.drop_slot("semel_bank")
    source.do(drop_publication)
    assert source.ask("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'semel_bank'") == [(0,)]


def test_a_capture_that_cannot_begin_says_one_sentence(source: Source) -> None:
    """And exits with the status of a wrong option, without a traceback."""
    semel = str(Path(sys.executable).parent / "semel")
    words = ["capture", source.address, "--name", source.name, "--table", "nowhere", "--bootstrap", source.bootstrap]
    done = subprocess.run([semel, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("There is no table 'nowhere'")
    assert done.stderr.count("\n") == 1
