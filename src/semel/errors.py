"""The one exception tree.

Every exception here survives pickling, since it crosses Spark processes: the message is the only positional argument,
everything else is a keyword kept in the instance's dictionary, which is what `BaseException.__reduce__` carries.

A message a user can meet says what happened, what it means for their data, and what to do next, in one sentence or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kio.schema.errors import ErrorCode


class SemelError(Exception):
    """Base of everything Semel raises on purpose."""

    undelivered: Sequence[Any] = ()
    """From `Producer.flush` and `close` without transactions: the batches that were given up, each with its records."""


class ConfigError(SemelError, ValueError):
    """A setting is wrong, or two settings contradict each other. Nothing was sent."""


class CorruptRecords(SemelError, ValueError):
    """The bytes of a record batch are not what they claim: truncated, wrong checksum, lying counts or lengths."""


class RecordTooLarge(SemelError, ValueError):
    """A record does not fit into the largest batch allowed, or a batch unpacks to more than the bound."""


class WireError(SemelError):
    """The peer sent bytes that are not a valid frame or message of Kafka's protocol."""


class BrokerUnreachable(SemelError, ConnectionError):
    """No connection could be made. Nothing was sent."""


class ConnectionLost(SemelError, ConnectionError):
    """The connection ended while requests were under way: whether the broker carried them out is not known."""


class RequestTimedOut(SemelError, TimeoutError):
    """No answer came in time: whether the broker carried the request out is not known."""


class AuthenticationFailed(SemelError):
    """The broker refused the credentials, or its certificate could not be trusted."""


class UnsupportedByBroker(SemelError):
    """The broker is too old for what was asked, or has it switched off."""


class KafkaError(SemelError):
    """A broker answered with an error code that retrying cannot cure.

    `is_fatal` tells that the client object that met it cannot go on. `is_earlier_try_open` tells that the request
    had been sent before and that try's answer never came, or left it open: it may have been carried out since.

    >>> from kio.schema.errors import ErrorCode
    >>> str(KafkaError("The topic is not there.", code=ErrorCode.unknown_topic_or_partition))
    'The topic is not there.'
    """

    def __init__(
        self, message: str, *, code: ErrorCode = ErrorCode.unknown_server_error, is_fatal: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.is_fatal = is_fatal
        self.is_earlier_try_open = False


class UnknownTopic(KafkaError):
    """A topic or partition does not exist."""


class NotAuthorized(KafkaError):
    """An ACL forbids it."""


class OffsetOutOfRange(KafkaError):
    """A position lies outside of what the partition still holds (or already holds)."""


class TopicRecreated(OffsetOutOfRange):
    """A topic was deleted and created again under the same name: positions in the old one mean nothing in the new."""


class Fenced(KafkaError):
    """A newer producer with the same `transactional.id` has taken over. This one cannot write again: stop it."""


class TransactionAborted(KafkaError):
    """The transaction cannot be committed and leaves no trace; a new one may begin with the same records."""


class CommitUnknown(SemelError):
    """A commit was asked for and no answer tells what became of it: the transaction may be committed or aborted.

    Never abort after it and never write the records again on a guess. `Producer.resolve()` fences the transaction and
    tells which of the two it became.
    """


class CommitPending(SemelError):
    """The database has committed, so both sides are decided; Kafka has not confirmed it yet.

    Never run the block again. The next `semel.both` of the same name finishes it first, and so does
    `semel.recover_both()`.
    """


class InboxOvertaken(SemelError):
    """Another reader of the same inbox has gone on from here. The results of this delivery were rolled back."""


class TransactionIncomplete(SemelError):
    """A transaction of a source database can never become whole. Nothing of it was applied, nor anything after it."""


class RecordFailed(SemelError):
    """A function or a write failed at one record. Its transaction was aborted; `__cause__` has the error itself."""

    def __init__(
        self, message: str, *, topic: str | None = None, partition: int | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        self.offset = offset


class TooManyDeadLetters(SemelError):
    """More records failed than `dead_letter_max` allows. The transaction that they were in was aborted."""


class WorkTooLong(SemelError):
    """One record alone takes longer than `transaction.timeout.ms`. Nothing of it was committed."""


class InvalidState(SemelError, RuntimeError):
    """A call that the object's state does not allow, such as a commit without a transaction. Nothing was changed."""


class DatabaseError(SemelError):
    """A database refused a statement; its transaction was rolled back. `is_transient`: the same again may succeed."""

    def __init__(self, message: str, *, sqlstate: str | None = None, is_transient: bool = False) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.is_transient = is_transient


class DatabaseUnreachable(DatabaseError, ConnectionError):
    """No connection to the database, or it was lost: whether the last transaction was committed is not known."""


class ValueDoesNotFit(DatabaseError, ValueError):
    """A value cannot be stored in its column. `row` counts from 0 within the batch; None if it is not known."""

    def __init__(
        self, message: str, *, row: int | None = None, column: str | None = None, sqlstate: str | None = None
    ) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.row = row
        self.column = column
