"""A group member and a transactional producer in one, so that the producer always knows the state of the consumer.

What is read, what is written for it and the progress in the input are one transaction. It is committed only by a member
that the group has confirmed directly before, and whoever loses a partition in the middle aborts and leaves the records
to the new owner.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from semel.client.config import Config
from semel.client.fetcher import Fetcher
from semel.client.membership import Membership
from semel.client.partitions import TopicPartition
from semel.client.producer import Producer
from semel.client.settings import parse_config
from semel.errors import ConfigError, InvalidState
from semel.session.claims import LOG, Claims, Safety
from semel.session.inputs import Inputs, PortionLimits
from semel.session.transaction import Transaction
from semel.session.turns import Turns
from semel.wire import Api

_POLL_MS: Final = 1_000
_ALL_SAFE: Final = Safety()
_STABLE_SINCE: Final = 7
"""OffsetFetch from this version on can wait for open transactions (Kafka 2.5)."""


class Session:
    """Settings have Kafka's names, in a mapping or as keywords with underscores.

    `name` is the pipeline's; several instances may share it and the group. An `instance` that is the same after a
    restart (such as the number of a pod) lets the new one end at once what the old one left open; without it, the
    others wait for the old one's transaction time-out. Two at the same time with one `instance` fence each other.

    >>> with Session(bootstrap="127.0.0.1:9092", group="g", topics=["in"], name="upper") as session:  # doctest: +SKIP
    ...     for transaction in session:
    ...         transaction.send_table("out", transaction.table)
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        group: str,
        topics: Collection[str],
        name: str,
        instance: str | None = None,
        transaction_records_max: int = 100_000,
        transaction_bytes_max: int = 32 * 1024 * 1024,
        transaction_linger_ms: float = 0.0,
        safety: Safety = _ALL_SAFE,
        **more_settings: object,
    ) -> None:
        if isinstance(topics, str) or not topics:
            raise ConfigError('topics must be a list of at least one name, such as ["orders"].')
        given = {**(settings or {}), **more_settings}
        self._settings, self.config = _fit(given, group, name, instance)
        self._resets_when_deleted = any(key.replace("_", ".") == "auto.offset.reset" for key in given)
        self.topics = tuple(topics)
        self._limits = PortionLimits(transaction_records_max, transaction_bytes_max, transaction_linger_ms)
        self._safety = safety
        self._is_stopping = False
        self._is_closed = False
        self._producer: Producer | None = None
        self._fetcher: Fetcher | None = None
        self._membership: Membership | None = None
        self._inputs: Inputs | None = None
        self._turns: Turns | None = None

    # -- opening and closing ---------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._producer is not None or self._is_closed:
            raise InvalidState("A session can be opened once: make a new one.")
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        config, group = self.config, self.config.group
        assert group.group_id is not None
        # The producer first: it ends what an earlier instance left open, before the group gives us its partitions.
        producer = self._producer = Producer(self._settings)
        is_stable = self._safety.stable_fetches and _can_wait_for_transactions(producer)
        safety = replace(self._safety, stable_fetches=is_stable)
        claims = Claims(time.monotonic, config.producer.transaction_timeout_ms, safety)
        # Where to begin without any offset is one thing; that records were deleted before they were read is another.
        reset = config.fetch.auto_offset_reset if self._resets_when_deleted else "error"
        self._fetcher = Fetcher(self._settings, replace(config.fetch, auto_offset_reset=reset))
        self._membership = Membership(config.client, group, self.topics, claims)
        self._inputs = Inputs(
            producer.cluster,
            self._fetcher,
            self._membership,
            group.group_id,
            reset=config.fetch.auto_offset_reset,
            require_stable=is_stable,
        )
        self._turns = Turns(producer, self._inputs, self._membership, claims, safety)
        self._membership.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.close))

    def close(self) -> None:
        """Abort what is open and leave the group."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._producer is not None:
                self._producer.close()
        finally:
            if self._membership is not None:
                self._membership.close()
            if self._fetcher is not None:
                self._fetcher.close()

    def stop(self) -> None:
        """Let `for transaction in session` end after the present turn. May be called from another thread."""
        self._is_stopping = True

    # -- how it stands ---------------------------------------------------------------------------------------------

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """The partitions that this session reads now."""
        return frozenset() if self._inputs is None else self._inputs.partitions

    @property
    def transactional_id(self) -> str:
        assert self.config.producer.transactional_id is not None
        return self.config.producer.transactional_id

    @property
    def committed_count(self) -> int:
        return 0 if self._turns is None else self._turns.committed_count

    @property
    def aborted_count(self) -> int:
        return 0 if self._turns is None else self._turns.aborted_count

    @property
    def rebalances(self) -> Mapping[str, int]:
        """Why partitions were asked back or lost, counted by reason."""
        return {} if self._membership is None else self._membership.reasons

    def _running(self) -> Turns:
        if self._turns is None or self._is_closed:
            raise InvalidState("The session is not open: use it in a `with` block.")
        return self._turns

    # -- transactions ----------------------------------------------------------------------------------------------

    def transaction(self, timeout_ms: float = _POLL_MS) -> Transaction:
        """The next records and a transaction for them; without records after `timeout_ms` it is empty.

        >>> with session.transaction() as transaction:  # doctest: +SKIP
        ...     for row in transaction.rows():
        ...         transaction.send("out", row.value.upper(), key=row.key)
        """
        turns = self._running()
        return Transaction(turns, lambda: turns.take(timeout_ms, self._limits))

    def __iter__(self) -> Iterator[Transaction]:
        """One transaction a turn, committed when the loop comes back for the next.

        A loop that is left by `break` or an exception aborts the turn it is left in; `stop()` ends it after a commit.
        """
        while not self._is_stopping:
            with self.transaction() as transaction:
                if not transaction.is_empty:
                    yield transaction

    async def __aiter__(self) -> AsyncIterator[Transaction]:
        while not self._is_stopping:
            async with self.transaction() as transaction:
                if not transaction.is_empty:
                    yield transaction


def _fit(given: Mapping[str, object], group: str, name: str, instance: str | None) -> tuple[dict[str, object], Config]:
    """The settings with what a session adds to them, and what they come to."""
    settings = {key.replace("_", "."): value for key, value in given.items() if value is not None}
    for taken, instead in (("group.id", "group"), ("transactional.id", "name")):
        if taken in settings:
            raise ConfigError(f"{taken} is what a session makes itself: write {instead}=... in its place.")
    settings |= {"group.id": group, "transactional.id": f"{name}-{instance or _unique()}"}
    settings.setdefault("auto.offset.reset", "earliest")
    session_ms = parse_config(settings).group.session_timeout_ms
    # Even if everything hangs after the last heartbeat, the transaction then ends before the member is removed.
    settings.setdefault("transaction.timeout.ms", min(60_000, max(1, session_ms * 2 // 3)))
    config = parse_config(settings)
    if config.producer.transaction_timeout_ms >= session_ms:
        LOG.warning(
            "transaction.timeout.ms=%d is not below session.timeout.ms=%d: a transaction that hangs may outlive its "
            "member, and whoever gets the partitions next waits for it. Lower the former.",
            config.producer.transaction_timeout_ms,
            session_ms,
        )
    return settings, config


def _unique() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _can_wait_for_transactions(producer: Producer) -> bool:
    return producer.cluster.any_connection().capabilities.version_for(Api.OFFSET_FETCH) >= _STABLE_SINCE
