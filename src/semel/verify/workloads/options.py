"""How much a workload does, of what size, and with which guarantees: the same for all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self

from semel.errors import ConfigError
from semel.verify.clients.face import Acks
from semel.verify.payload import BYTES_MAX, HEAD_BYTES

Guarantee = Literal["at-most-once", "at-least-once", "exactly-once"]
GUARANTEES: Final[tuple[Guarantee, ...]] = ("at-most-once", "at-least-once", "exactly-once")


@dataclass(frozen=True)
class Options:
    """
    >>> Options(partitions=8).partitions
    8
    """

    partitions: int = 4
    """Of each topic."""
    replication: int = 1
    sources: int = 2
    """Processes that fill the input, where the workload has one."""
    workers: int = 2
    """Processes that do what the workload is about."""
    readers: int = 1
    """Processes that read committed records meanwhile."""
    uncommitted_readers: int = 0
    batch_records_max: int = 100
    """A transaction, or a batch without one, has 1 to so many records."""
    record_bytes: int = 100
    keys: int = 100
    abort_fraction: float = 0.1
    """Of the transactions, at random, on purpose."""
    rate: float = 0.0
    """Records a second that each source (or worker, where there are no sources) sends; 0: as fast as it can."""
    records: int = 0
    """A source (or worker) ends its life after so many; 0: when it is told to."""
    writing: Literal["transactions", "idempotent", "plain"] = "idempotent"
    """How sources write."""
    acks: Acks = "all"
    assignment: Literal["auto", "group", "manual"] = "auto"
    """How workers share the input: as members of a group, or each a fixed part; auto is whichever is safe."""
    guarantee: Guarantee = "exactly-once"
    """Of workers, where the workload has a choice: in transactions, or without."""
    transaction_timeout_ms: int = 15_000
    session_timeout_ms: int = 6_000
    patience_s: float = 30.0
    """How long a client goes on trying while the broker is away before it calls the outcome failed or unknown."""

    def __post_init__(self) -> None:
        low = {"partitions": 1, "replication": 1, "workers": 1, "batch_records_max": 1, "keys": 1, "record_bytes": 0}
        for name, least in low.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: write at least {least}.")
        if not HEAD_BYTES <= self.record_bytes <= BYTES_MAX:
            raise ConfigError(f"record_bytes={self.record_bytes} is out of range: write {HEAD_BYTES} to {BYTES_MAX}.")
        if not 0 <= self.abort_fraction < 1:
            raise ConfigError(f"abort_fraction={self.abort_fraction} is out of range: write 0 to below 1.")
        if self.guarantee not in GUARANTEES:
            raise ConfigError(f"There is no guarantee {self.guarantee!r}: choose one of {', '.join(GUARANTEES)}.")
        if self.acks != "all" and self.writing != "plain":
            raise ConfigError(f'acks={self.acks} needs writing="plain": the other ways wait for every replica.')

    @classmethod
    def from_mapping(cls, given: dict[str, Any]) -> Self:
        unknown = sorted(set(given) - {one.name for one in fields(cls)})
        if unknown:
            raise ConfigError(f"{', '.join(unknown)} is no option of a workload: remove it.")
        return cls(**given)
