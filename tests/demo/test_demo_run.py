"""The demo itself, small: real Spark, real kills, and a table that must have zeros in Semel's column."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semel.demo.victims import descendants, is_alive

pytestmark = pytest.mark.chaos

COMMAND = [sys.executable, "-P", "-c", "from semel.cli.entry import main; main()", "demo"]


def row(output: str, name: str) -> tuple[int, int]:
    """The two numbers of a row of the table: the plain sink's and Semel's."""
    found = re.search(rf"^{name} +([\d,]+) +([\d,]+) *$", output, re.MULTILINE)
    assert found is not None, output
    plain, semel = (int(number.replace(",", "")) for number in found.groups())
    return plain, semel


@pytest.mark.parametrize("database", ["postgres", "sqlite"])
def test_a_small_demo_has_zeros_for_semel_and_repeats_for_the_plain_sink(tmp_path: Path, database: str) -> None:
    """E2, E3, F1, G1: executor, broker, database, relay and driver are killed; everything is there once.

    In the topics and in the table. The plain sink repeats in both, so the kills hit where it matters.
    """
    page = tmp_path / "page.html"
    command = [*COMMAND, "--seconds", "5", "--seed", "7", "--database", database, "--report", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    sent, also_sent = row(done.stdout, "orders taken")
    assert sent == also_sent > 500
    for name in ("lost", "wrong", "rows lost", "rows wrong"):
        assert row(done.stdout, name) == (0, 0)
    for name in ("repeated", "rows repeated"):
        plain, semel = row(done.stdout, name)
        assert plain > 0
        assert semel == 0
    assert row(done.stdout, "torn")[1] == 0
    assert row(done.stdout, "rows expected") == (sent, sent)
    assert row(done.stdout, "rows found") == (sent + row(done.stdout, "rows repeated")[0], sent)
    for victim in ("driver", "executor", "broker", "relay", *(["database"] if database == "postgres" else [])):
        assert f"kill -9 {victim}" in done.stdout
    other = "--database sqlite" if database == "postgres" else "pip install 'semel[postgres,clients]'"
    assert re.search(rf"^Database: {database}.*{re.escape(other)}", done.stdout, re.MULTILINE | re.IGNORECASE)
    assert f"each of the {sent:,} orders came from the shop's database to Kafka once" in " ".join(done.stdout.split())
    assert "<svg" in page.read_text()
    assert list(tmp_path.iterdir()) == [page]


def test_an_interrupt_ends_everything_at_once(tmp_path: Path) -> None:
    """Ctrl-C while Spark runs: no broker, JVM or worker is left, and nothing waits for the broker that was killed."""
    with subprocess.Popen([*COMMAND, "--seed", "7"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as demo:
        deadline = time.monotonic() + 120
        family = descendants(demo.pid)
        while not any("pyspark.daemon" in one.command for one in family):
            assert demo.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "Spark did not start"
            time.sleep(0.2)
            family = descendants(demo.pid)
        demo.send_signal(signal.SIGINT)
        said, _ = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert "Stopped" in said
    assert not [one.command for one in family if is_alive(one.number)]
