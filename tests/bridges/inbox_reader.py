"""Readers with an inbox in Postgres, one after the other, each in a process of its own that dies at a given step.

Arguments: the database's URI, the bootstrap address, the topic, and for each reader the step of its second delivery
before which it is killed: the beginning of a statement, `commit`, or `committed`. An empty one reads to the end. The
exit code of each is a line of the output. They are forks of this process, because most of a start is imports; it looks
at a delivery first, so that all is imported that they need.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import psycopg

from semel.bridges.inbox import Inbox


class _Mortal(psycopg.Connection[Any]):
    """Dies at a step, once there is one to die at."""

    step: str | None = None

    def die_at(self, step: str) -> None:
        if self.step is not None and step.startswith(self.step):
            os.kill(os.getpid(), signal.SIGKILL)

    def commit(self) -> None:
        self.die_at("commit")
        super().commit()
        self.die_at("committed")


class _Cursor(psycopg.Cursor[Any]):
    def execute(self, query: Any, params: Any = None, **more: Any) -> Any:
        assert isinstance(self.connection, _Mortal)
        self.connection.die_at(query)
        return super().execute(query, params, **more)


def make_inbox(connection: Any, bootstrap: str, topic: str) -> Inbox:
    settings = {"bootstrap": bootstrap, "fetch_max_wait_ms": 50}
    return Inbox(connection, settings, topics=[topic], name="billing", delivery_records_max=7)


def read(uri: str, bootstrap: str, topic: str, step: str | None) -> None:
    connection = _Mortal.connect(uri, cursor_factory=_Cursor)
    with make_inbox(connection, bootstrap, topic) as inbox:
        deliveries = 0
        while (delivery := inbox.next(1_000)) is not None:
            connection.step = step if deliveries else None
            with delivery as database:
                for row in delivery.rows():
                    database.execute("INSERT INTO seen VALUES (%s)", (int(row.value or b""),))
            deliveries += 1
    connection.close()


def main(uri: str, bootstrap: str, topic: str, *steps: str) -> None:
    with psycopg.connect(uri) as connection, make_inbox(connection, bootstrap, topic) as inbox:
        inbox.next(10_000)
    for step in steps:
        child = os.fork()
        if child == 0:
            read(uri, bootstrap, topic, step or None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
