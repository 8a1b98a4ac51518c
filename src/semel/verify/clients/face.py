"""What a workload needs of a client library: writers with and without transactions, a reader, a member of a group.

Records go in and out as arrays, so that a library with a fast path can take it. Whatever a library raises arrives as
one of `semel.errors`: `Fenced` ends the life of the process; after any other error inside a transaction the caller
aborts it. Partitions are numbers of `Manifest.partitions` throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semel.errors import ConfigError, RequestTimedOut
from semel.verify.history import Isolation, Phase

Integers = npt.NDArray[Any]
Acks = Literal["all", "1", "0"]

PATIENCE_S: Final = 30.0
"""How long a call goes on trying while the broker is away, before it is called failed or unknown."""
RETRY_S: Final = 0.05


class Outcome(Enum):
    """What a commit is known to have become. Unknown is an honest answer, and never a guess at one of the others."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Records to write, in this order."""

    partition: Integers
    payloads: pa.BinaryArray
    keys: pa.BinaryArray

    def __len__(self) -> int:
        return len(self.partition)


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of records that were written without a transaction: a `Phase` and an offset (-1: not told) each."""

    phase: npt.NDArray[np.uint8]
    offset: npt.NDArray[np.int64]

    @classmethod
    def all_alike(cls, count: int, phase: Phase) -> Delivered:
        return cls(np.full(count, phase, np.uint8), np.full(count, -1, np.int64))


@dataclass(frozen=True, slots=True)
class Incoming:
    """Records that were read, those of a partition in their order."""

    partition: Integers
    offset: Integers
    payloads: pa.BinaryArray
    restarted: frozenset[int] = frozenset()
    """Partitions whose records do not go on where the last ones ended, because they were given to this reader anew."""

    def __len__(self) -> int:
        return len(self.partition)


NOTHING: Final = Incoming(np.empty(0, np.int16), np.empty(0, np.int64), pa.array([], pa.binary()))


class TransactionalWriter(Protocol):
    """One `transactional.id`, which every new owner takes over from the one before."""

    def connect(self) -> None:
        """Own the id, if this writer does not (any more): what an earlier owner had left open is settled on return.

        Raises `Fenced` for ever once this writer was fenced: it must not take the id back.
        """
        ...

    def begin(self) -> None:
        """Open a transaction; connects if need be."""
        ...

    def send(self, records: Outgoing) -> None:
        """Hand over records; they may still wait for `flush`."""
        ...

    def send_positions(self, positions: Mapping[int, int], group: str, member: object) -> None:
        """Put the next offsets to read into the transaction; `member` is `GroupConsumer.member`."""
        ...

    def flush(self) -> Integers:
        """Wait until the records of this transaction are stored; their offsets as they were sent, -1: not told."""
        ...

    def commit(self) -> Outcome:
        """Never raises: whoever was fenced is told so by the next `connect`."""
        ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class PlainWriter(Protocol):
    """Writes without transactions."""

    def write(self, records: Outgoing) -> Delivered:
        """Write and wait. Never repeats a record by itself after it has told that one's fate is unknown."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """Reads partitions that it was given."""

    def poll(self, timeout_ms: int, records_max: int) -> Incoming: ...

    def seek(self, positions: Mapping[int, int]) -> None: ...

    def close(self) -> None: ...


class GroupConsumer(Protocol):
    """Reads committed records of a topic, from the positions that its group has committed."""

    def poll(self, timeout_ms: int, records_max: int) -> Incoming: ...

    def rewind(self) -> None:
        """Back to the committed positions, after a transaction that came to nothing. To be repeated while it raises."""
        ...

    def commit(self, positions: Mapping[int, int]) -> None:
        """Make these next offsets the group's, without a transaction, and wait until they are."""
        ...

    @property
    def member(self) -> object:
        """Who it was in the group when the last records came, so that a late commit is refused (KIP-447)."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Surroundings:
    """What every client of a process is told."""

    bootstrap: str
    partitions: Sequence[tuple[str, int]]
    """Of the manifest."""
    client_id: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """Kafka's names, such as `security.protocol`, for whichever library."""
    transaction_timeout_ms: int = 15_000
    session_timeout_ms: int = 6_000
    patience_s: float = PATIENCE_S
    is_stopping: Callable[[], bool] = lambda: False

    def number_of(self) -> dict[tuple[str, int], int]:
        return {place: number for number, place in enumerate(self.partitions)}

    def keep_trying(self, call: Callable[[], bool], what: str) -> None:
        """Call until it returns True; `RequestTimedOut` when patience is spent or the process is to stop."""
        deadline = time.monotonic() + self.patience_s
        while not call():
            if time.monotonic() > deadline or self.is_stopping():
                raise RequestTimedOut(f"{what} did not succeed within {self.patience_s:g} s: the broker is away.")
            time.sleep(RETRY_S)


@dataclass(frozen=True)
class Clients:
    """A library, connected to one cluster: how it makes each kind of client. Each client closes itself."""

    surroundings: Surroundings
    new_transactional_writer: Callable[[Surroundings, str], TransactionalWriter]
    new_plain_writer: Callable[[Surroundings, bool, Acks], PlainWriter]
    new_reader: Callable[[Surroundings, Mapping[int, int], Isolation], Reader]
    new_group_consumer: Callable[[Surroundings, str, str], GroupConsumer]
    close: Callable[[], None] = lambda: None
    """Ends what its clients share, if anything."""

    def transactional_writer(self, transactional_id: str) -> TransactionalWriter:
        return self.new_transactional_writer(self.surroundings, transactional_id)

    def plain_writer(self, *, idempotent: bool, acks: Acks) -> PlainWriter:
        if idempotent and acks != "all":
            raise ConfigError(f"acks={acks} contradicts idempotent writing, which needs every replica: write acks=all.")
        return self.new_plain_writer(self.surroundings, idempotent, acks)

    def reader(self, positions: Mapping[int, int], isolation: Isolation) -> Reader:
        return self.new_reader(self.surroundings, positions, isolation)

    def group_consumer(self, group: str, topic: str) -> GroupConsumer:
        """Of records of `topic`."""
        return self.new_group_consumer(self.surroundings, group, topic)


_UNDERSCORED: Final = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}


def underscored(settings: Mapping[str, Any], library: str) -> dict[str, Any]:
    """The settings under the names that kafka-python and its descendants have for them."""
    unknown = sorted(set(settings) - set(_UNDERSCORED))
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)} cannot be passed on to {library}: only {', '.join(_UNDERSCORED)} can. Leave it out."
        )
    return {_UNDERSCORED[name]: value for name, value in settings.items()}
