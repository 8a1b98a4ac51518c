"""One life of one process of a workload: what it was told, its history, its clients, and when it is to stop."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import numpy as np

from semel.errors import AuthenticationFailed, ConfigError, Fenced, NotAuthorized, SemelError
from semel.private_files import write_private_text
from semel.verify.clients.face import Clients, Surroundings
from semel.verify.history import HistoryWriter
from semel.verify.workloads.options import Options

T = TypeVar("T")

_PAUSE_S: Final = 0.1
HOPELESS: Final = (Fenced, ConfigError, AuthenticationFailed, NotAuthorized)
"""What no broker that comes back cures."""


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker process needs to know; a file of JSON in the run's folder."""

    folder: str
    number: int
    """Of this process in `Manifest.processes`; its rows go to `<number>.rows`."""
    name: str
    """Of the client, the same in all its lives: `copier-0`."""
    life: int
    """0 for the first."""
    role: str
    index: int
    count: int
    """It is one of so many with this role."""
    workload: str
    prefix: str
    library: str
    bootstrap: str
    partitions: list[tuple[str, int]]
    seed: int
    settings: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def path(self) -> Path:
        return Path(self.folder) / f"{self.number}.worker.json"

    def save(self) -> None:
        write_private_text(self.path, json.dumps(asdict(self), indent=1))  # settings may hold a password

    @classmethod
    def load(cls, path: Path) -> Self:
        fields = json.loads(path.read_text())
        fields["partitions"] = [(topic, index) for topic, index in fields["partitions"]]
        return cls(**fields)


class Stopped(Exception):
    """The process was told to stop while it waited for something."""


class Life:
    """What a role has at hand while it lives."""

    def __init__(self, spec: WorkerSpec, stopping: threading.Event, open_clients: Callable[..., Clients]) -> None:
        self.spec = spec
        self.options = Options.from_mapping(spec.options)
        self.number = spec.number
        self.chance = random.Random(f"{spec.seed}-{spec.name}-{spec.life}")
        self.numbers = np.random.default_rng(self.chance.getrandbits(64))
        self._stopping = stopping
        self._sent = 0
        self._due_s = time.monotonic()
        self.surroundings = Surroundings(
            bootstrap=spec.bootstrap,
            partitions=spec.partitions,
            client_id=f"{spec.prefix}-{spec.name}",
            settings=spec.settings,
            transaction_timeout_ms=self.options.transaction_timeout_ms,
            session_timeout_ms=self.options.session_timeout_ms,
            patience_s=self.options.patience_s,
            is_stopping=stopping.is_set,
        )
        self.history = HistoryWriter(Path(spec.folder) / f"{spec.number}.rows", process=spec.number)
        self.clients = open_clients(spec.library, self.surroundings)

    @property
    def transactional_id(self) -> str:
        return f"{self.spec.prefix}-{self.spec.name}"

    @property
    def is_over(self) -> bool:
        """Whether it was told to stop, or has done all it was to do."""
        return self._stopping.is_set() or 0 < self.options.records <= self._sent

    def batch_size(self) -> int:
        """How many records the next batch has."""
        size = self.chance.randint(1, self.options.batch_records_max)
        return min(size, self.options.records - self._sent) if self.options.records else size

    def wants_abort(self) -> bool:
        return self.chance.random() < self.options.abort_fraction

    def keep_pace(self, records: int) -> None:
        """So many were sent: wait until the next are due."""
        self._sent += records
        if self.options.rate > 0:
            # Time that was lost while the broker was away is not made up for.
            self._due_s = max(self._due_s, time.monotonic() - 1) + records / self.options.rate
            self._stopping.wait(max(0.0, self._due_s - time.monotonic()))

    def pause(self, seconds: float = _PAUSE_S) -> None:
        self._stopping.wait(seconds)

    def insist(self, call: Callable[[], T]) -> T:
        """Call until it succeeds, whatever becomes of the broker; `Stopped` if the process is to stop before that."""
        while True:
            try:
                return call()
            except HOPELESS:
                raise
            except SemelError:
                self.pause()
                if self._stopping.is_set():
                    raise Stopped from None
