"""The process that makes the calls in one way of `semel guarantees --effects`. It is killed and started again.

Arguments: the way, the bootstrap address, the topic, the URL to call, and the file of the SQLite database.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from typing import Final

from semel.bridges.effects import Effects
from semel.bridges.inbox import Inbox
from semel.session.transaction import Row
from semel.verify.call_recorder import post
from semel.verify.side_effects import BATCH, CLAIMED_NAME, Way

_IDLE_MS: Final = 700
_LEASE_S: Final = 1.0
"""Short, so that a restart need not wait long for the claims of the process that was killed."""


def main(way: Way, bootstrap: str, topic: str, url: str, path: str) -> None:
    if way in ("call, then commit", "commit, then call"):
        _work_naively(way, bootstrap, topic, url, path)
        return
    takes_key = way == "claimed, with key"

    def call(row: Row, key: str) -> None:
        post(url, _body(row), key=key if takes_key else None)

    effects = Effects(path, name=CLAIMED_NAME, takes_key=takes_key, lease_s=_LEASE_S)
    effects.run(call, bootstrap=bootstrap, topics=[topic], idle_ms=_IDLE_MS, delivery_records_max=BATCH)


def _work_naively(way: Way, bootstrap: str, topic: str, url: str, path: str) -> None:
    with (
        closing(sqlite3.connect(path)) as connection,
        Inbox(connection, {"bootstrap": bootstrap}, topics=[topic], name="naive", delivery_records_max=BATCH) as inbox,
    ):
        while (delivery := inbox.next(_IDLE_MS)) is not None:
            calls_first = way == "call, then commit"
            with delivery:
                if calls_first:
                    _call_all(list(delivery.rows()), url)
            if not calls_first:
                _call_all(list(delivery.rows()), url)


def _call_all(rows: list[Row], url: str) -> None:
    for row in rows:
        post(url, _body(row))


def _body(row: Row) -> str:
    return (row.value or b"").decode()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
