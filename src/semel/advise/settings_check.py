"""The rules about settings: of one client, and of clients that run beside each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from semel.advise.client_settings import ClientSettings
from semel.advise.rules import Finding, finding

_SESSION_TIMEOUT_MS: Final = 45_000
_TRANSACTION_TIMEOUT_MS: Final = 60_000
_HEARTBEAT_MS: Final = 3_000
"""Kafka's defaults."""
_IN_FLIGHT_MAX: Final = 5
_CHANGING: Final = re.compile(r"\$\{random|\$\{?RANDOM\b|uuidgen|\$\{?(?:pid|PID)\b|\$\$|\{uuid|%\{uuid", re.IGNORECASE)
"""Placeholders that are another text at each start: Spring's, a shell's."""
_COPIES: Final = (
    "transaction.state.log.replication.factor",
    "offsets.topic.replication.factor",
    "offset.storage.replication.factor",
    "offset.syncs.topic.replication.factor",
    "checkpoints.topic.replication.factor",
)
"""Of brokers, Kafka Connect and MirrorMaker: the topics that positions and transactions are kept in."""
_NO_ATOMIC_RENAME: Final = ("s3", "s3a", "s3n", "gs", "oss", "cosn", "obs")
_MANAGER: Final = "spark.sql.streaming.checkpointfilemanagerclass"


def check_settings(settings: ClientSettings, *, transaction_timeout_ms_max: int | None = None) -> Iterator[Finding]:
    """What is wrong within one client's settings. The maximum is that of the brokers, where it is known."""
    yield from _check_idempotence(settings)
    yield from _check_transactions(settings)
    yield from _check_timeouts(settings)
    yield from _check_spark(settings)
    yield from _check_positions(settings)
    timeout = settings.whole("transaction.timeout.ms")
    if transaction_timeout_ms_max is not None and timeout is not None and timeout > transaction_timeout_ms_max:
        yield finding(
            "transaction-timeout-above-broker-maximum",
            settings.place("transaction.timeout.ms"),
            f"transaction.timeout.ms={timeout}, and the brokers allow {transaction_timeout_ms_max}",
            f"transaction.timeout.ms={transaction_timeout_ms_max}",
        )


def check_beside(clients: Iterable[ClientSettings]) -> Iterator[Finding]:
    """What is wrong between clients of one cluster that run at the same time."""
    seen: dict[tuple[str, str | None], ClientSettings] = {}
    for one in clients:
        name = one.transactional_id
        if name is None or _CHANGING.search(name):
            continue
        key = name, one.get("bootstrap.servers")
        if key in seen:
            yield finding(
                "transactional-id-shared",
                one.place("transactional.id"),
                f"transactional.id={name} is also that of {seen[key].place('transactional.id')}",
                f"transactional.id={name}-2",
            )
        seen.setdefault(key, one)


def _check_idempotence(settings: ClientSettings) -> Iterator[Finding]:
    acks, retries = settings.get("acks"), settings.whole("retries")
    in_flight = settings.whole("max.in.flight.requests.per.connection")
    wanted = settings.truth("enable.idempotence")
    needs = "transactional.id" if settings.transactional_id else "enable.idempotence=true" if wanted else None
    if needs:
        wrong = [
            (acks in ("0", "1"), "acks", f"acks={acks}"),
            (retries == 0, "retries", "retries=0"),
            (
                in_flight is not None and in_flight > _IN_FLIGHT_MAX,
                "max.in.flight.requests.per.connection",
                f"max.in.flight.requests.per.connection={in_flight}",
            ),
            (wanted is False, "enable.idempotence", "enable.idempotence=false"),
        ]
        for is_wrong, name, text in wrong:
            if is_wrong:
                yield finding(
                    "idempotence-contradicted", settings.place(name), f"{text} contradicts {needs}", f"# remove {text}"
                )
        return
    if acks in ("0", "1"):
        yield finding("acks-not-all", settings.place("acks"), f"acks={acks}", "acks=all")
    elif wanted is False:  # with acks=0 or 1 it is off in any case
        what = "enable.idempotence=false"
        if in_flight != 1:
            what += f", with {in_flight or 'several'} requests in flight: retries can also change the order"
        yield finding("idempotence-off", settings.place("enable.idempotence"), what, "enable.idempotence=true")
    if retries == 0:
        yield finding("retries-off", settings.place("retries"), "retries=0", "# remove retries=0")


def _check_transactions(settings: ClientSettings) -> Iterator[Finding]:
    name = settings.transactional_id or settings.get("transaction.id.prefix")
    if name is None:
        return
    if _CHANGING.search(name):
        # Spring's prefix belongs to containers that send offsets with the group's metadata, and so may whoever has a
        # group beside its producer.
        is_in_group = settings.transactional_id is None or settings.get("group.id") is not None
        yield finding(
            "transactional-id-changes-in-group" if is_in_group else "transactional-id-changes",
            settings.place("transactional.id" if settings.transactional_id else "transaction.id.prefix"),
            f"transactional.id={name} is another text at each start",
            "transactional.id=my-pipeline-0",
        )
    if settings.truth("enable.auto.commit"):
        yield finding(
            "auto-commit-with-transactions",
            settings.place("enable.auto.commit"),
            f"enable.auto.commit=true beside transactional.id={name}",
            "enable.auto.commit=false",
        )
    if (settings.get("isolation.level") or "").lower() in ("read_uncommitted", "0"):
        yield finding(
            "read-uncommitted-beside-transactions",
            settings.place("isolation.level"),
            f"isolation.level=read_uncommitted beside transactional.id={name}",
            "isolation.level=read_committed",
        )


def _check_timeouts(settings: ClientSettings) -> Iterator[Finding]:
    session, beat = settings.whole("session.timeout.ms"), settings.whole("heartbeat.interval.ms")
    if (settings.get("group.protocol") or "").lower() == "consumer":
        beat = session = None  # these are the brokers' settings then
    if (beat is not None and 3 * beat > (session or _SESSION_TIMEOUT_MS)) or (
        beat is None and session is not None and session < _HEARTBEAT_MS
    ):
        limit = session or _SESSION_TIMEOUT_MS
        yield finding(
            "heartbeat-too-slow",
            settings.place("heartbeat.interval.ms" if beat else "session.timeout.ms"),
            f"heartbeat.interval.ms={beat or _HEARTBEAT_MS} with session.timeout.ms={limit}",
            f"heartbeat.interval.ms={limit // 3}",
        )
    timeout = settings.whole("transaction.timeout.ms")
    is_whole = settings.transactional_id is not None and (session is not None or settings.get("group.id") is not None)
    if is_whole and (timeout is not None or session is not None):
        timeout, limit = timeout or _TRANSACTION_TIMEOUT_MS, session or _SESSION_TIMEOUT_MS
        if timeout >= limit:
            name = "transaction.timeout.ms" if settings.get("transaction.timeout.ms") else "session.timeout.ms"
            yield finding(
                "transaction-timeout-not-below-session-timeout",
                settings.place(name),
                f"transaction.timeout.ms={timeout} with session.timeout.ms={limit}",
                f"transaction.timeout.ms={limit * 2 // 3}",
            )


def _check_positions(settings: ClientSettings) -> Iterator[Finding]:
    """Where connectors, mirrors and brokers keep positions. One copy is all there can be on one broker."""
    for name, value in settings.values.items():
        if name.endswith("offset.storage") and value.endswith("MemoryOffsetBackingStore"):
            yield finding("position-in-memory", settings.place(name), f"{name}={value}")
    if settings.names_several_brokers:
        for name in _COPIES:
            if settings.whole(name) == 1:
                yield finding("internal-topic-not-replicated", settings.place(name), f"{name}=1", f"{name}=3")


def _check_spark(settings: ClientSettings) -> Iterator[Finding]:
    checkpoint = settings.get("checkpointlocation")
    if checkpoint is not None:
        yield from check_checkpoint(
            checkpoint, settings.place("checkpointlocation"), settings.get(_MANAGER) is not None
        )
    if settings.truth("failondataloss") is False:
        yield finding(
            "data-loss-accepted", settings.place("failondataloss"), "failOnDataLoss=false", "failOnDataLoss=true"
        )


def check_checkpoint(location: str, where: str, has_manager: bool) -> Iterator[Finding]:
    """Whether Spark can keep a checkpoint there. `has_manager` says that Spark's way to write it was replaced."""
    scheme, colon, _ = location.partition("://")
    if colon and scheme in _NO_ATOMIC_RENAME and not has_manager:
        yield finding(
            "checkpoint-without-atomic-rename",
            where,
            f"the checkpoint {location} is on {scheme}",
            *(
                (
                    "spark.sql.streaming.checkpointFileManagerClass="
                    "org.apache.spark.internal.io.cloud.AbortableStreamBasedCheckpointFileManager",
                )
                if scheme == "s3a"
                else ()
            ),
        )
    if re.match(r"(?:file:(?://)?)?/(?:var/)?tmp(?:/|$)", location):
        yield finding("checkpoint-in-temporary-folder", where, f"the checkpoint is {location}")
