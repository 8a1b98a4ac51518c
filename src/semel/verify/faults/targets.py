"""What a run is pointed at: the embedded broker, an Apache Kafka started for it, or a cluster of somebody else's.

A target can be started, and says which faults it cannot have, with the reason. The faults themselves are methods here;
when they come is the driver's business.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from semel.broker import shifted_clock
from semel.broker.control_file import write_control
from semel.broker.process import Broker
from semel.broker.storage import limited_disk
from semel.errors import BrokerUnreachable, ConfigError, InvalidState, SemelError
from semel.testing.apache_kafka import LATEST, ApacheKafka, quick_settings
from semel.testing.exchange import live_brokers
from semel.verify.faults.kinds import BROKER_KINDS, FaultKind
from semel.verify.faults.plan import Cast, Worker

FsyncMode = Literal["always", "commit", "never"]
_ENVIRONMENT: Final = threading.Lock()
_LAST_LINES: Final = 15
_FORGOTTEN_MARKERS: Final = (
    "a single broker of Kafka 4 (seen on 4.3.0) that starts again after a kill sometimes takes the partitions of a "
    "transaction that was being ended for deleted, and never writes its markers; name kill in --faults to see it"
)


class Target:
    """A cluster under test: a context manager, or `start()` and `close()`. Brokers are numbered from 0."""

    name: str = ""
    restart_ms: int = 0
    """How long a broker takes to start, about."""
    impossible: Mapping[FaultKind, str] = {}
    """The faults it cannot have, and why."""
    flawed: Mapping[FaultKind, str] = {}
    """The faults it is known not to survive, and why: they come only if they are asked for by name."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @property
    def bootstrap(self) -> str:
        """Where the brokers themselves listen; clients of a run are given the proxy's address."""
        raise NotImplementedError

    @property
    def broker_count(self) -> int:
        return 1

    def cast(self, workers: Sequence[Worker], *, longest_timeout_ms: int, apis: Sequence[str] = ()) -> Cast:
        """Who is there, for a plan: these brokers and the supervisor's workers."""
        return Cast(
            brokers=self.broker_count,
            workers=tuple(workers),
            longest_timeout_ms=longest_timeout_ms,
            restart_ms=self.restart_ms,
            can_pause_brokers=FaultKind.PAUSE not in self.impossible,
            apis=tuple(apis),
        )

    # Faults. Each can be taken back in any state, so that a driver can clean up after whatever happened.

    def kill_broker(self, number: int) -> None:
        raise self._cannot(FaultKind.KILL)

    def stop_broker(self, number: int) -> None:
        raise self._cannot(FaultKind.RESTART)

    def start_broker(self, number: int) -> None:
        """Start it again after `kill_broker` or `stop_broker`; one that runs is left alone."""
        raise self._cannot(FaultKind.RESTART)

    def pause_broker(self, number: int) -> None:
        raise self._cannot(FaultKind.PAUSE)

    def resume_broker(self, number: int) -> None:
        """One that is not paused is left alone."""
        raise self._cannot(FaultKind.PAUSE)

    def fill_disk(self, number: int, free_bytes: int) -> None:
        raise self._cannot(FaultKind.DISK)

    def free_disk(self, number: int) -> None:
        raise self._cannot(FaultKind.DISK)

    def shift_clock(self, number: int, jump_ms: int) -> None:
        """Let the broker's time jump; jumps add up and outlast a restart."""
        raise self._cannot(FaultKind.CLOCK)

    def check_broker(self, number: int) -> None:
        """Raise BrokerUnreachable, with its last words, if a broker has ended that nobody has ended."""

    def _cannot(self, kind: FaultKind) -> SemelError:
        return InvalidState(f"The fault {kind} cannot be had on {self.name}: {self.impossible.get(kind, 'not there')}.")


class EmbeddedTarget(Target):
    """`semel.Broker` in a process of its own. Its data is in `folder`, which stays, or in a temporary one."""

    name = "the embedded broker"
    restart_ms = 1_000

    def __init__(
        self,
        folder: Path | None = None,
        *,
        transaction_version: int = 2,
        fsync: FsyncMode = "commit",
        config: Mapping[str, object] | None = None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="semel-verify-") if folder is None else None
        self._folder = Path(self._temporary.name) if self._temporary else folder or Path()
        self._full_path = str(self._folder / "disk-is-full")
        self._clock_path = str(self._folder / "clock-shift-ms")
        self._shift_ms = 0
        settings = {**quick_settings(1), "transaction.version": transaction_version, **(config or {})}
        self.broker = Broker(data=self._folder / "data", fsync=fsync, config=settings, start_timeout_s=60)

    @property
    def bootstrap(self) -> str:
        return self.broker.bootstrap

    def start(self) -> None:
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        self.free_disk(0)
        self.start_broker(0)

    def close(self) -> None:
        self.broker.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def kill_broker(self, number: int) -> None:
        self.broker.kill()

    def stop_broker(self, number: int) -> None:
        self.broker.stop()

    def start_broker(self, number: int) -> None:
        if not self.broker.is_running:
            with _environment({limited_disk.VARIABLE: self._full_path, shifted_clock.VARIABLE: self._clock_path}):
                self.broker.start()

    def pause_broker(self, number: int) -> None:
        self.broker.pause()

    def resume_broker(self, number: int) -> None:
        if self.broker.is_running:
            self.broker.resume()

    def fill_disk(self, number: int, free_bytes: int) -> None:
        write_control(self._full_path, str(free_bytes))

    def free_disk(self, number: int) -> None:
        Path(self._full_path).unlink(missing_ok=True)

    def shift_clock(self, number: int, jump_ms: int) -> None:
        self._shift_ms += jump_ms
        write_control(self._clock_path, str(self._shift_ms))

    def check_broker(self, number: int) -> None:
        if not self.broker.is_running:
            words = self.broker.log_path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise _ended_by_itself("The embedded broker", "\n".join(words))


class KafkaTarget(Target):
    """Apache Kafka of a release, fetched by Maven, with one or three brokers. It needs Java and Maven."""

    name = "Apache Kafka"
    restart_ms = 8_000
    impossible: Mapping[FaultKind, str] = {
        FaultKind.DISK: "a full disk takes a file system of its own, which only root can make",
        FaultKind.CLOCK: "its processes read the machine's clock, which is everybody's",
    }

    def __init__(
        self,
        version: str = LATEST,
        *,
        nodes: int = 1,
        transaction_version: int | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.kafka = ApacheKafka(version, nodes=nodes, transaction_version=transaction_version, config=config)
        if nodes == 1 and not version.startswith(("2.", "3.")):
            self.flawed = {FaultKind.KILL: _FORGOTTEN_MARKERS}

    @property
    def bootstrap(self) -> str:
        return self.kafka.bootstrap

    @property
    def broker_count(self) -> int:
        return self.kafka.node_count

    def start(self) -> None:
        self.kafka.start()

    def close(self) -> None:
        self.kafka.close()

    def kill_broker(self, number: int) -> None:
        self.kafka.node(number).kill()

    def stop_broker(self, number: int) -> None:
        self.resume_broker(number)  # one that is paused would never see the SIGTERM
        self.kafka.node(number).stop()

    def start_broker(self, number: int) -> None:
        node = self.kafka.node(number)
        if not node.running:
            node.start()

    def pause_broker(self, number: int) -> None:
        os.kill(self.kafka.node(number).pid, signal.SIGSTOP)

    def resume_broker(self, number: int) -> None:
        node = self.kafka.node(number)
        if node.running:
            os.kill(node.pid, signal.SIGCONT)

    def check_broker(self, number: int) -> None:
        node = self.kafka.node(number)
        if not node.running:
            raise _ended_by_itself(f"{node.name} of Apache Kafka", node.log_tail(_LAST_LINES))


class RemoteTarget(Target):
    """Brokers of somebody else: nothing is done to them, only to the run's own requests, workers and ids."""

    name = "a remote cluster"
    impossible: Mapping[FaultKind, str] = dict.fromkeys(
        sorted(BROKER_KINDS), "its brokers are not this program's to stop"
    )

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._broker_count = 0

    @property
    def bootstrap(self) -> str:
        return self._bootstrap

    @property
    def broker_count(self) -> int:
        return self._broker_count

    def start(self) -> None:
        """Only look whether somebody is there."""
        host, _, port = self._bootstrap.split(",")[0].strip().rpartition(":")
        self._broker_count = len(live_brokers((host, int(port))))

    def close(self) -> None:
        """It was there before and stays."""


def parse_target(
    text: str,
    *,
    folder: Path | None = None,
    transaction_version: int | None = None,
    config: Mapping[str, str] | None = None,
) -> Target:
    """The target that a user names: `embedded`, `kafka`, `kafka:3.9.2`, or `HOST:PORT[,HOST:PORT...]`.

    `config` is settings for the broker, where it is started here.

    >>> parse_target("kafka:3.9.2").name, parse_target("broker.example:9092").name
    ('Apache Kafka', 'a remote cluster')
    """
    if text == "embedded":
        version = 2 if transaction_version is None else transaction_version
        return EmbeddedTarget(folder, transaction_version=version, config=config)
    kind, _, rest = text.partition(":")
    if kind == "kafka" and (not rest or rest.count(".") == 2):
        return KafkaTarget(rest or LATEST, transaction_version=transaction_version, config=config)
    if all(_is_address(entry) for entry in text.split(",")):
        return RemoteTarget(text)
    raise ConfigError(f"The target {text!r} is not known: write embedded, kafka, kafka:3.9.2 or HOST:PORT.")


def _ended_by_itself(who: str, last_words: str) -> SemelError:
    return BrokerUnreachable(f"{who} has ended by itself, which no fault asked for. Its last words:\n{last_words}")


def _is_address(entry: str) -> bool:
    host, _, port = entry.strip().rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) <= 65_535


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """For a process that is started inside; one at a time, as the environment is the whole process's."""
    with _ENVIRONMENT:
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                os.environ.pop(name, None)
