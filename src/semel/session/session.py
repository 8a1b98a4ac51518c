"""A group member and a transactional producer in one, so that the producer always knows the state of the consumer.

What is read, what is written for it and the progress in the input are one transaction. It is committed only by a member
that the group has confirmed directly before, and whoever loses a partition in the middle aborts and leaves the records
to the new owner.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Final, Self

from semel.client.cluster import Cluster
from semel.client.config import Config
from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.client.fetcher import Fetcher
from semel.client.membership import Membership
from semel.client.partitions import TopicPartition
from semel.client.producer import Producer
from semel.client.settings import check_option_names, parse_config
from semel.errors import ConfigError, InvalidState
from semel.metrics.parts import SESSION
from semel.observe import Pipeline
from semel.session.async_steps import AsyncSteps
from semel.session.claims import LOG, Claims, Safety
from semel.session.dead_letter_box import DeadLetterBox
from semel.session.inputs import Inputs, Portion, PortionLimits, topic_identities
from semel.session.instance_owner import InstanceOwner
from semel.session.pace import Pace
from semel.session.sigterm import SigtermWatch
from semel.session.thread_use import ThreadUse
from semel.session.transaction import Transaction
from semel.session.turns import Turns
from semel.wire import Api

_POLL_MS: Final = 1_000
_ALL_SAFE: Final = Safety()
_LEGAL_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{3,249}")
_STABLE_SINCE: Final = 7
"""OffsetFetch from this version on can wait for open transactions (Kafka 2.5)."""


class Session:
    """Settings have Kafka's names, in a mapping or as keywords with underscores.

    `name` is the pipeline's; several instances may share it and the group. An `instance` that is the same after a
    restart (such as the number of a pod) makes a static member: the new session takes over its partitions at once,
    and ends what the old one left open. Of two at the same time with one `instance` the older one is fenced and stops.

    What `Transaction.dead_letter` is given goes to the topic `dead_letter`, at most `dead_letter_max` of them (None: no
    limit). In the main thread, SIGTERM commits the present transaction and exits, unless the program has a handler of
    its own or `end_on_sigterm` is False.

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
        dead_letter: str | None = None,
        dead_letter_max: int | None = DEAD_LETTER_MAX,
        end_on_sigterm: bool = True,
        safety: Safety = _ALL_SAFE,
        **more_settings: object,
    ) -> None:
        if isinstance(topics, str) or not topics:
            raise ConfigError('topics must be a list of at least one name, such as ["orders"].')
        check_option_names(more_settings, OPTIONS, "A session")
        given = {**(settings or {}), **more_settings}
        self._settings, self.config = _fit(given, group, name, instance)
        self._resets_when_deleted = any(key.replace("_", ".") == "auto.offset.reset" for key in given)
        self.topics = tuple(topics)
        self._limits = PortionLimits(transaction_records_max, transaction_bytes_max, transaction_linger_ms)
        self._dead_letters = DeadLetterBox(dead_letter, dead_letter_max, self.topics)
        self._safety = safety
        self._pipeline = Pipeline(SESSION, name)
        self._is_stopping = False
        self._is_closed = False
        # A place that the user did not name need not be kept when the session ends in order.
        self._leaves_for_good = not any(key.replace("_", ".") == "group.instance.id" for key in given)
        self._has_instance = instance is not None
        self._steps = AsyncSteps(name)
        self._use = ThreadUse()
        self._left_open: Transaction | None = None
        self._sigterm = SigtermWatch(self._on_sigterm)
        self._ends_on_sigterm = end_on_sigterm
        self._producer: Producer | None = None
        self._fetcher: Fetcher | None = None
        self._membership: Membership | None = None
        self._inputs: Inputs | None = None
        self._turns: Turns | None = None

    # -- opening and closing ---------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._watch_sigterm()
        return self._enter()

    def _enter(self) -> Self:
        if self._producer is not None or self._is_closed:
            raise InvalidState("A session can be opened once: make a new one.")
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _watch_sigterm(self) -> None:
        if self._ends_on_sigterm:
            self._sigterm.start()

    def _on_sigterm(self) -> None:
        LOG.info("SIGTERM: the session ends after the present transaction. A second one ends the process at once.")
        self._is_stopping = True

    def _start(self) -> None:
        config, group = self.config, self.config.group
        assert group.group_id is not None
        # The producer first: it ends what an earlier instance left open, before the group gives us its partitions.
        producer = self._producer = Producer(self._settings)
        topic_identities(producer.cluster, self.topics)  # raises if one is not there: nothing could ever come
        self._dead_letters.check_writable(producer.cluster, config.producer)
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
            is_last_started=self._make_judge(producer),
        )
        pace = Pace(config.producer.transaction_timeout_ms / 1000, self._limits.records_max)
        self._turns = Turns(
            producer, self._inputs, self._membership, claims, safety, pace, self._dead_letters, self._pipeline
        )
        self._membership.start()

    def _make_judge(self, producer: Producer) -> Callable[[], bool] | None:
        """Only where `transactional.id` and `group.instance.id` are made of the same `instance`."""
        is_one_place = self._has_instance and self._leaves_for_good
        return InstanceOwner(producer, self.transactional_id).is_last_started if is_one_place else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(for_good=self._ended_in_order(error))
        if error is None:
            self._sigterm.raise_exit()

    def _ended_in_order(self, error: BaseException | None) -> bool:
        if error is not None:
            self._pipeline.failed(error)
        return error is None and not self._sigterm.was_raised

    async def __aenter__(self) -> Self:
        self._use.is_async = True
        self._watch_sigterm()  # here, since only the main thread can
        try:
            return await self._steps.run(self._enter)
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError):
                await self._steps.run(self.close)
            raise
        finally:
            if self._is_closed:
                self._steps.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sigterm.end()  # here, since only the main thread can
        try:
            await self._steps.run(partial(self._close, for_good=self._ended_in_order(error)))
        finally:
            self._steps.close()
        if error is None:
            self._sigterm.raise_exit()

    def close(self) -> None:
        """Abort what is open and leave the group."""
        self._close(for_good=True)

    def _close(self, *, for_good: bool) -> None:
        """After an error or SIGTERM a static member keeps its place: most likely it is started again."""
        self._sigterm.end()
        if self._is_closed:
            return
        with self._use.step(in_turn=True):
            self._is_closed = True
            self._close_clients(for_good=for_good)

    def _close_clients(self, *, for_good: bool) -> None:
        try:
            if self._producer is not None:
                self._producer.close()
        finally:
            if self._membership is not None:
                self._membership.close(for_good=for_good and self._leaves_for_good)
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
    def dead_letter_count(self) -> int:
        """How many dead letters this session has committed."""
        return self._dead_letters.committed_count

    @property
    def dead_letters(self) -> DeadLetterBox:
        """What goes to the dead-letter topic, and how much."""
        return self._dead_letters

    @property
    def has_dead_letters(self) -> bool:
        """Whether it has a topic for them."""
        return self._dead_letters.topic is not None

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    @property
    def cluster(self) -> Cluster:
        """The connections that it writes with, for questions between transactions."""
        self._running()
        assert self._producer is not None
        return self._producer.cluster

    @property
    def rebalances(self) -> Mapping[str, int]:
        """Why partitions were asked back or lost, counted by reason."""
        return {} if self._membership is None else self._membership.reasons

    def _running(self) -> Turns:
        if self._turns is None or self._is_closed:
            raise InvalidState("The session is not open: use it in a `with` block.")
        return self._turns

    # -- transactions ----------------------------------------------------------------------------------------------

    def transaction(self, timeout_ms: float = _POLL_MS, *, records_max: int | None = None) -> Transaction:
        """The next records and a transaction for them; without records after `timeout_ms` it is empty.

        `records_max` is for this one, where it is lower than the session's `transaction_records_max`.

        >>> with session.transaction() as transaction:  # doctest: +SKIP
        ...     for row in transaction.rows():
        ...         transaction.send("out", row.value.upper(), key=row.key)
        """
        turns = self._running()
        self._sigterm.raise_exit()
        limits = self._limits
        if records_max is not None:
            limits = replace(limits, records_max=min(records_max, limits.records_max))
        return Transaction(turns, lambda: self._take(turns, timeout_ms, limits), self._steps, self._use)

    def _take(self, turns: Turns, timeout_ms: float, limits: PortionLimits) -> Portion:
        left, self._left_open = self._left_open, None
        if left is not None and left.outcome is None:
            turns.give_up(left, GeneratorExit())
        return turns.take(timeout_ms, limits)

    def __iter__(self) -> Iterator[Transaction]:
        """One transaction a turn, committed when the loop comes back for the next.

        A loop that is left by `break` or an exception aborts the turn it is left in; `stop()` ends it after a commit.
        """
        while not self._is_stopping:
            with self.transaction() as transaction:
                if not transaction.is_empty:
                    yield transaction

    def __aiter__(self) -> AsyncIterator[Transaction]:
        return _AsyncTurns(self)

    def leave_open(self, transaction: Transaction | None) -> None:
        """A turn of `async for`: if the loop is left, it is aborted before the next one, or when the session closes."""
        self._left_open = transaction


OPTIONS: Final = tuple(signature(Session).parameters)
"""What a session is given besides Kafka's settings."""


class _AsyncTurns:
    """`async for` over a session. No generator: one that is left by a cancellation would end its turn at any time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: Transaction | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Transaction:
        if self._open is not None:
            transaction, self._open = self._open, None
            self._session.leave_open(None)
            await transaction.__aexit__(None, None, None)
        while not self._session.is_stopping:
            transaction = await self._session.transaction().__aenter__()
            if not transaction.is_empty:
                self._open = transaction
                self._session.leave_open(transaction)
                return transaction
            await transaction.__aexit__(None, None, None)
        raise StopAsyncIteration


def _fit(given: Mapping[str, object], group: str, name: str, instance: str | None) -> tuple[dict[str, object], Config]:
    """The settings with what a session adds to them, and what they come to."""
    settings = {key.replace("_", "."): value for key, value in given.items() if value is not None}
    for taken, instead in (("group.id", "group"), ("transactional.id", "name")):
        if taken in settings:
            raise ConfigError(f"{taken} is what a session makes itself: write {instead}=... in its place.")
    settings |= {"group.id": group, "transactional.id": f"{name}-{instance or _unique()}"}
    if instance is not None:
        settings.setdefault("group.instance.id", _place_of(f"{name}-{instance}"))
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


def _place_of(instance: str) -> str:
    """Kafka allows in `group.instance.id` what it allows in the name of a topic."""
    if _LEGAL_NAME.fullmatch(instance):
        return instance
    return f"semel-{hashlib.sha256(instance.encode()).hexdigest()[:32]}"


def _unique() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _can_wait_for_transactions(producer: Producer) -> bool:
    return producer.cluster.any_connection().capabilities.version_for(Api.OFFSET_FETCH) >= _STABLE_SINCE
