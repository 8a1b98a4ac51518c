"""`Effects`: calls outside of any transaction, each claimed in a database before it is made and confirmed after it."""

from __future__ import annotations

import inspect
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, TypeVar

from semel.bridges.addresses import check_sqlite_path, is_postgres_url
from semel.bridges.database import Database
from semel.bridges.effects.rules import (
    ENDED,
    ClaimDecision,
    Effect,
    EffectRules,
    EffectState,
    Failure,
    decide_claim,
    decide_done,
    decide_failure,
    decide_resolution,
)
from semel.bridges.effects.table import EffectsTable
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.sqlite import SqliteDatabase
from semel.client.dead_letters import describe_error
from semel.errors import ConfigError, DatabaseError, SemelError
from semel.session.transaction import Row

if TYPE_CHECKING:
    from semel.bridges.effects.topic import EffectsReport

LOG: Final = logging.getLogger("semel.effects")
_LOOK_AGAIN_S: Final = 0.5
"""How often to look whether another worker has ended its call before its lease did."""
_CLAIM_TRIES: Final = 5
_DATABASE_PAUSE_S: Final = 0.2
_TEXT_MAX: Final = 4_000
_NAME_BYTES_MAX: Final = 500
KEY_BYTES_MAX: Final = 2_000
"""Name and key are one row of an index, which has at most 2,704 bytes in Postgres."""
_NOT_ASYNC: Final = (
    "The function is async, and effects call plain functions: no call was made, and the effect is not done. Write it "
    "without async, or start the work with asyncio.run(...) inside of it."
)
_inherited: Final[list[threading.local]] = []
"""Connections of a parent process, in a forked one."""

_Value = TypeVar("_Value")


class EffectNotDone(SemelError):
    """Raise it from a call that was certainly not carried out, such as one that could not connect: it is made again."""


class EffectRejected(EffectNotDone):
    """Raise it from a call that the callee has refused for good: it is not made again and becomes a dead letter."""


class DatabaseOpener(Protocol):
    """What `semel.Postgres` and `semel.SQLite` are here."""

    def open(self) -> Database: ...


class Claim:
    """One attempt. Its claim is committed when the block begins, and how the call ended when the block ends.

    Make the call only if `is_ours`. An exception leaves the block after it was recorded.
    """

    def __init__(self, effects: Effects, key: str, row: Row | None) -> None:
        self.key = key
        """The idempotency key: the same in every attempt."""
        self.result: str | None = None
        """Text that is kept with the confirmation; set it in the block if you want to."""
        self._effects = effects
        self._row = row
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self._effect: Effect | None = None
        self.is_ours = False
        """Whether to make the call."""
        self.is_changed = False
        """Whether the effect's state was changed by this claim, and not by an earlier one."""
        self.wait_s = 0.0
        """If the effect has not ended and is not ours: for how long its lease or its back-off still lasts."""

    @property
    def effect(self) -> Effect:
        """The row as it was last seen."""
        if self._effect is None:
            raise ConfigError("This claim has not begun: use it in a `with` block.")
        return self._effect

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_ours:
            return
        if error is None:
            self.confirm(self.result)
        else:
            self.fail(error)

    def begin(self) -> None:
        """Commit the claim, or find out that there is nothing to claim."""
        half_lease_s = self._effects.rules.lease_ms / 2_000
        for _ in range(_CLAIM_TRIES):
            asked_at = time.monotonic()
            decision, is_changed, now_ms = self._effects.retry(lambda table: table.claim(self.key, self._decide))
            self._effect = decision.effect
            self.is_changed = self.is_changed or is_changed
            self.wait_s = max(0.0, (decision.effect.due_ms - now_ms) / 1000)
            # A process that was paused meanwhile must not go on to a call for which its lease is too short.
            if decision.action != "call" or time.monotonic() - asked_at < half_lease_s:
                self.is_ours = decision.action == "call"
                return
        too_short = ConfigError(
            f"Claiming effect {self.key!r} took longer than half of its lease {_CLAIM_TRIES} times, so the call was "
            "not made. Raise lease_s."
        )
        self.fail(EffectNotDone(str(too_short)))
        raise too_short

    def _decide(self, effect: Effect | None, now_ms: int) -> ClaimDecision:
        decision = decide_claim(effect, self.key, self._owner, now_ms, self._effects.rules)
        if effect is None and self._row is not None:
            from_record = _with_origin(decision.effect, self._row)
            return ClaimDecision(decision.action, from_record)
        return decision

    def confirm(self, result: str | None = None) -> None:
        """Commit that the call was carried out."""
        epoch = self.effect.epoch
        kept = None if result is None else _text(result)
        self._end(lambda effect, now_ms: decide_done(effect, epoch, now_ms, kept), "was carried out")

    def fail(self, error: BaseException) -> None:
        """Commit that the call raised, and what is known of it."""
        epoch, rules, jitter = self.effect.epoch, self._effects.rules, random.random()
        failure, text = self._effects.judge(error), _text(describe_error(error))
        self._end(
            lambda effect, now_ms: decide_failure(effect, epoch, now_ms, failure, text, rules, jitter=jitter),
            f"raised {text}",
        )

    def _end(self, change: Callable[[Effect, int], Effect | None], what: str) -> None:
        self.is_ours = False
        changed = self._effects.retry(lambda table: table.change(self.key, change))
        if changed is not None:
            self._effect = changed
            return
        LOG.warning(
            "The call for effect %r %s, but its lease had passed and another worker has claimed the effect since; "
            "that worker's claim stands.",
            self.key,
            what,
        )


class Ending(NamedTuple):
    """How an effect ended, and whether it did so just now."""

    effect: Effect
    is_new: bool


class Effects:
    """Calls to the outside (mail, HTTP, payments) that are claimed in a database before they are made.

    `to` is the database for the claims: `semel.Postgres(...)`, `semel.SQLite(...)`, a Postgres URL, or the path of a
    SQLite file. `name` tells these effects from others in the same database. `takes_key` says whether the callee
    recognises the idempotency key that every call gets, and carries out a repeated call only once. If it does not, a
    call is never made again unless it was certainly not carried out: the call raised `EffectNotDone` or one of
    `retry_on`. `lease_s` must be longer than a call takes. `docs/effects.md` says what is promised.

    Threads may share it; each has a connection of its own, which it closes by `close`.

    >>> effects = Effects("app.db", name="invoices-mail", takes_key=True)  # doctest: +SKIP
    >>> effects.call("invoice-17", lambda key: send_mail(invoice, key)).state  # doctest: +SKIP
    'done'
    """

    def __init__(
        self,
        to: DatabaseOpener | str | Path,
        *,
        name: str,
        takes_key: bool,
        attempts: int = 5,
        backoff_s: float = 1.0,
        backoff_max_s: float = 60.0,
        lease_s: float = 60.0,
        retry_on: type[Exception] | tuple[type[Exception], ...] = (),
        database_retry_s: float = 300.0,
    ) -> None:
        if not name:
            raise ConfigError("Effects need a name, which tells them from others in the same database.")
        check_text(name, f"{name[:50]!r} cannot be the name of effects", _NAME_BYTES_MAX)
        self.name = name
        self.rules = EffectRules(
            takes_key, attempts, round(lease_s * 1000), round(backoff_s * 1000), round(backoff_max_s * 1000)
        )
        self._open = _opener(to)
        self._retry_on = _classes(retry_on)
        self._database_retry_s = database_retry_s
        self._of_thread = threading.local()
        self._process_id = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this thread's connection. It opens again when it is used."""
        if self._process_id != os.getpid():
            return  # the connection is the parent process's
        table: EffectsTable | None = self._of_thread.__dict__.pop("table", None)
        if table is not None:
            table.close()

    def open_database(self) -> Database:
        """A new connection to the database of the claims, which the caller closes."""
        return self._open()

    # -- calls -------------------------------------------------------------------------------------------------------

    def claim(self, key: str, *, row: Row | None = None) -> Claim:
        """One attempt at the effect of this key, for a `with` block.

        >>> with effects.claim("invoice-17") as claim:  # doctest: +SKIP
        ...     if claim.is_ours:
        ...         send_mail(invoice, claim.key)
        """
        check_key(key)
        return Claim(self, key, row)

    def call(self, key: str, call: Callable[[str], object]) -> Effect:
        """Make the call with the key until it is done, dead or unknown. If it was ended before, no call is made.

        Text that the call returns is kept in the row. Waits while another worker makes the call, and between attempts.
        """
        return self.call_until_ended(key, call, pause=_sleep).effect

    def call_until_ended(
        self, key: str, call: Callable[[str], object], *, pause: Callable[[float], bool], row: Row | None = None
    ) -> Ending:
        """The same; `pause` waits for so many seconds. If it returns True, no more attempts are made."""
        check_synchronous(call)
        is_new = False
        while True:
            claim = self.claim(key, row=row)
            claim.begin()
            if claim.is_ours:
                _make(call, claim)
                claim.wait_s = 0.0
            is_new = is_new or claim.is_changed
            if claim.effect.state in ENDED:
                return Ending(claim.effect, is_new)
            if pause(min(claim.wait_s, _LOOK_AGAIN_S)):
                return Ending(claim.effect, is_new)

    def judge(self, error: BaseException) -> Failure:
        """What an exception of the call says about it."""
        if isinstance(error, EffectRejected):
            return "rejected"
        return "not done" if isinstance(error, (EffectNotDone, *self._retry_on)) else "open"

    def run(self, call: Callable[[Row, str], object], **options: Any) -> EffectsReport:
        """Make one call for each record of some topics: `semel.effects.run` with this object's database and rules."""
        from semel.bridges.effects.topic import run_topic

        return run_topic(self, call, **options)

    # -- for people --------------------------------------------------------------------------------------------------

    def unknown(self) -> list[Effect]:
        """The effects of which nobody knows whether they were carried out, oldest first."""
        return self._find("unknown")

    def dead(self) -> list[Effect]:
        """The effects that were given up, with their last errors."""
        return self._find("dead")

    def get(self, key: str) -> Effect | None:
        """The effect of a key; None if it was never claimed."""
        return self.retry(lambda table: table.get(key))

    def resolve(self, key: str, *, done: bool) -> Effect:
        """Decide what became of an effect that is unknown or dead.

        With `done=False` the call is made again: by a running or the next `run`, if the record is still in its topic,
        or by your own next `call` with this key.
        """
        changed = self.retry(
            lambda table: table.change(key, lambda effect, now_ms: decide_resolution(effect, done, now_ms))
        )
        assert changed is not None
        return changed

    def forget(self, older_than: timedelta) -> int:
        """Delete the rows of effects that were done so long ago; returns how many.

        If such a key comes again later, its call is made again.
        """
        return self.retry(lambda table: table.forget(int(older_than.total_seconds() * 1000)))

    def _find(self, state: EffectState) -> list[Effect]:
        return self.retry(lambda table: table.find(state))

    # -- the database ------------------------------------------------------------------------------------------------

    def retry(self, action: Callable[[EffectsTable], _Value]) -> _Value:
        """Run it on this thread's connection, again while the database is away for a moment."""
        return self.patiently(lambda: action(self._table()))

    def patiently(self, action: Callable[[], _Value]) -> _Value:
        """Run it again while the database is away for a moment."""
        deadline = time.monotonic() + self._database_retry_s
        while True:
            try:
                return action()
            except DatabaseError as error:
                if not error.is_transient or time.monotonic() > deadline:
                    raise
                LOG.warning("The claims of %r wait for their database: %s", self.name, error)
                time.sleep(_DATABASE_PAUSE_S)

    def _table(self) -> EffectsTable:
        if self._process_id != os.getpid():
            # Forked since. The connections belong to the parent. They are kept, because closing one would end it there.
            _inherited.append(self._of_thread)
            self._of_thread, self._process_id = threading.local(), os.getpid()
        table: EffectsTable | None = getattr(self._of_thread, "table", None)
        if table is None:
            table = self._of_thread.table = EffectsTable(self._open(), self.name)
        return table


def _classes(retry_on: type[Exception] | tuple[type[Exception], ...]) -> tuple[type[Exception], ...]:
    given = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    for one in given:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise ConfigError(f"retry_on={one!r} is no class of exceptions: write retry_on=(ConnectionError,).")
    return given


def check_synchronous(call: Callable[..., object]) -> None:
    """Refuse an `async def` function: it would return a coroutine, and the effect would count as done."""
    if any(map(inspect.iscoroutinefunction, (call, type(call).__call__))):
        raise ConfigError(_NOT_ASYNC)


def check_key(key: str) -> None:
    """Raise if a database could not keep it.

    >>> check_key("invoice-17")
    """
    if not isinstance(key, str):
        raise ConfigError(f"{key!r} cannot be an idempotency key: it must be text. Write str(...).")
    check_text(key, f"{key[:50]!r} cannot be an idempotency key", KEY_BYTES_MAX)


def check_text(text: str, fault: str, bytes_max: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{fault}: it has half a surrogate pair, so it is not Unicode text.") from None
    if not text or "\0" in text:
        raise ConfigError(f"{fault}: write text without NUL characters.")
    if size > bytes_max:
        raise ConfigError(
            f"{fault}: it has {size:,} bytes in UTF-8, and an index takes {bytes_max:,}. Use a digest of it, "
            "such as hashlib.sha256(...).hexdigest()."
        )


def _make(call: Callable[[str], object], claim: Claim) -> None:
    try:
        result = call(claim.key)
    except BaseException as error:
        claim.fail(error)
        if not isinstance(error, Exception):
            raise
        effect = claim.effect
        LOG.warning("Attempt %d of effect %r failed: %s", effect.attempts, claim.key, describe_error(error))
    else:
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            claim.fail(EffectNotDone(_NOT_ASYNC))
            raise ConfigError(_NOT_ASYNC)
        claim.confirm(result if isinstance(result, str) else None)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _with_origin(effect: Effect, row: Row) -> Effect:
    return replace(effect, topic=row.topic, partition=row.partition, offset=row.offset)


def _text(text: str) -> str:
    """What every database can store."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()[:_TEXT_MAX]


def _opener(to: DatabaseOpener | str | Path) -> Callable[[], Database]:
    if isinstance(to, str) and is_postgres_url(to):
        return lambda: PostgresDatabase(to)
    if isinstance(to, str) and ("dbname=" in to or "host=" in to):
        raise ConfigError("Write the address of a Postgres database as a URL: postgresql://user@host/database.")
    if isinstance(to, (str, Path)):
        check_sqlite_path(to)
        return lambda: SqliteDatabase(to)
    if not callable(getattr(to, "open", None)):
        raise ConfigError(
            f"A {type(to).__qualname__} is no place for claims: each thread needs a connection of its own. Give the "
            "URL of a Postgres database, the path of a SQLite file, semel.Postgres(...) or semel.SQLite(...)."
        )
    return to.open
