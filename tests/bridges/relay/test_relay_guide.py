"""The commands of docs/relay.md, run as they stand there, with real addresses in place of the made-up ones."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from relay_scene import Outbox, broker, in_postgres, in_sqlite, server

import semel
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "server"]

PAGE = Path(__file__).parents[3] / "docs" / "relay.md"


def test_the_table_of_the_page_is_the_one_that_the_function_gives() -> None:
    """A reader may copy either."""
    [shown] = re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown.strip() == semel.outbox_table_sql()


def test_the_commands_of_the_page_relay_rows_until_they_are_stopped(
    server: Postgres, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Ready, then rows, then SIGTERM or Ctrl-C; every row is there."""
    [block] = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    to_sqlite, to_postgres = (shlex.split(line) for line in block.splitlines())
    outboxes: list[tuple[Outbox, str, list[str], signal.Signals, int]] = [
        (in_sqlite(tmp_path, broker), "shop.db", to_sqlite, signal.SIGINT, 0),
        (in_postgres(server, broker), "postgresql://shop@localhost/shop", to_postgres, signal.SIGTERM, 143),
    ]
    for outbox, shown, words, number, status in outboxes:
        outbox.make_table()
        outbox.write(1, 30)
        real = {"semel": str(Path(sys.executable).parent / "semel"), shown: outbox.address}
        real |= {"127.0.0.1:9092": outbox.bootstrap, "shop": outbox.name}
        command = [real.get(word, word) for word in words]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        try:
            assert running.stdout is not None
            assert running.stdout.readline().startswith("semel relay ready: outbox of ")
            while len(outbox.read()) < 30:
                assert running.poll() is None
            running.send_signal(number)
            _, said = running.communicate(timeout=30)
        finally:
            running.kill()
            running.wait()
        assert running.returncode == status, said
        assert outbox.has_each_once(30)
    assert outboxes[1][0].ask("SELECT count(*) FROM outbox") == [(0,)]
