"""`semel.capture`: committed changes of Postgres tables into Kafka, each once, as they were committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from semel.bridges.addresses import check_postgres_url
from semel.bridges.capture.options import HEARTBEAT_S, make_capture_options
from semel.bridges.capture.run import CaptureRun
from semel.bridges.capture.source import CaptureSource
from semel.bridges.relay.options import DEFAULT_PROGRESS_TOPIC, POLL_MS, RETRY_S, ROWS_MAX
from semel.bridges.relay.runs import RelayReport
from semel.bridges.sigterm_end import ends_on_sigterm
from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.client.settings import merge_settings


def capture(
    database: str,
    *,
    name: str,
    tables: Sequence[str] | None = None,
    outbox: str | None = None,
    topic: str | None = None,
    id: str = "id",
    value: str = "value",
    key: str | None = None,
    headers: str | None = None,
    timestamp: str | None = None,
    slot: str | None = None,
    publication: str | None = None,
    failover: bool = False,
    snapshot: bool = True,
    heartbeat_s: float = HEARTBEAT_S,
    dead_letter: str | None = None,
    dead_letter_max: int = DEAD_LETTER_MAX,
    progress_topic: str = DEFAULT_PROGRESS_TOPIC,
    transaction_rows_max: int = ROWS_MAX,
    poll_ms: float = POLL_MS,
    retry_s: float = RETRY_S,
    stop: threading.Event | None = None,
    idle_ms: float | None = None,
    end_on_sigterm: bool = True,
    on_ready: Callable[[], None] | None = None,
    settings: Mapping[str, object] | None = None,
    **more_settings: Any,
) -> RelayReport:
    """Write the changes of tables to Kafka until `stop` is set, or until nothing has come for `idle_ms`.

    First come the rows that are there, then every insert, update, delete and truncate, in the order in which they were
    committed; each event is in its topic exactly once, also after a crash. The headers say which transaction an event
    belongs to, so that `SourceInbox` and `apply_changes` can copy whole transactions. `docs/capture.md` has the format.

        database              postgresql://user:password@host/database, of a role with REPLICATION
        name                  of the capture: its slot, its progress and its transactions are named after it
        tables                the tables to capture, such as ["accounts", "bank.entries"]
        outbox                instead: an outbox table, of which every inserted row is a record
        topic                 "{schema}.{table}", or "{topic}" for an outbox; columns of the row in braces
        id, value, key, headers, timestamp   columns of the outbox, as for `relay`
        slot, publication     their names in Postgres; both are made if they are not there
        failover              True has standbys keep the slot too (Postgres 17)
        snapshot              False begins with the changes, and leaves out the rows that are there
        heartbeat_s           how often the slot moves on though nothing was captured (10)
        dead_letter           the topic for events that cannot be written, at which the capture stops otherwise
        dead_letter_max       how many such events a run may have (1,000)
        progress_topic        where progress is kept ("semel-relay-progress")
        transaction_rows_max  how many events a Kafka transaction may have (10,000)
        poll_ms               how often to look whether to end (100)
        retry_s               for how many seconds a lost database or broker is tried again (300)

    Kafka's settings, such as `bootstrap`, are keywords or in `settings`.

    >>> capture("postgresql://shop@localhost/shop", name="shop", tables=["accounts"],
    ...         bootstrap="127.0.0.1:9092", idle_ms=1000)  # doctest: +SKIP
    RelayReport(rows=3, transactions=1, dead_letters=0, deleted=0)
    """
    options = make_capture_options(
        name,
        merge_settings(settings, more_settings),
        tables=tables,
        outbox=outbox,
        topic=topic,
        slot=slot,
        publication=publication,
        failover=failover,
        snapshot=snapshot,
        heartbeat_s=heartbeat_s,
        id=id,
        value=value,
        key=key,
        headers=headers,
        timestamp=timestamp,
        dead_letter=dead_letter,
        dead_letter_max=dead_letter_max,
        progress_topic=progress_topic,
        rows_max=transaction_rows_max,
        poll_ms=poll_ms,
        retry_s=retry_s,
    )
    check_postgres_url(database)

    with ends_on_sigterm("capture", stop, watches=end_on_sigterm) as is_over:
        run = CaptureRun(CaptureSource(database, options, is_over), options, is_over)
        run.go(idle_ms, on_ready)
    return run.report
