"""A real Apache Kafka on this machine for tests: no container, only Java and Maven.

    with ApacheKafka() as kafka:
        producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap})

Each node is broker and controller in one process (KRaft, combined mode), on free ports of the loopback interface, with
its data in a temporary folder. Releases before 3.3 have a ZooKeeper beside them instead. All is gone after the `with`
block, and the processes also die with the test process.
"""

from __future__ import annotations

import atexit
import base64
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from semel.errors import ConfigError, InvalidState
from semel.testing.kafka_node import FULL_SPEED, HOST, QUICK_START, Node, PortTaken, ZooKeeper
from semel.testing.maven import jars
from semel.testing.security import KeyPair, Protocol, Security, Tls

__all__ = [
    "FULL_SPEED",
    "LATEST",
    "OLD",
    "OLDEST",
    "QUICK_START",
    "ApacheKafka",
    "KeyPair",
    "Node",
    "Protocol",
    "Security",
    "Tls",
    "kafka_jars",
]

LATEST = "4.3.0"
"""The newest release line: transaction protocol 2 unless formatted otherwise."""
OLD = "3.9.2"
"""The last release line before 4.0: transaction protocol 1."""
OLDEST = "2.5.1"
"""The oldest release line that Semel promises to work with (KIP-360, KIP-447); runs with ZooKeeper."""

KRAFT_SINCE = (3, 3)
READY_TIMEOUT_S = 90.0
PORT_ATTEMPTS = 5
NO_SECURITY = Security()


def kafka_jars(version: str = LATEST) -> Path:
    """The folder with the jars of Apache Kafka `version`, server and client, fetched by Maven at first use."""
    # Kafka logs through slf4j and its jars bring no back end; this one writes to standard error on all versions alike.
    return jars(f"apache-kafka/{version}", [f"org.apache.kafka:kafka_2.13:{version}", "org.slf4j:slf4j-simple:1.7.36"])


class ApacheKafka:
    """A cluster of one or three nodes; a context manager, or `start()` and `close()`.

    `transaction_version` 2 is transaction protocol 2 (KIP-890); 1 and 0 are protocol 1, also on new brokers; None is
    the release's default. `config` is broker settings, which win over everything chosen here. `keep` leaves the folder
    in place for a look after the end.
    """

    def __init__(
        self,
        version: str = LATEST,
        *,
        nodes: int = 1,
        transaction_version: int | None = None,
        config: Mapping[str, str] | None = None,
        security: Security = NO_SECURITY,
        jvm: Sequence[str] = QUICK_START,
        log_level: str = "warn",
        ready_timeout_s: float = READY_TIMEOUT_S,
        keep: bool = False,
    ) -> None:
        if nodes < 1:
            raise ConfigError(f"A cluster of {nodes} nodes cannot be started: ask for one or three.")
        if transaction_version and _release(version) < (4, 0):
            raise ConfigError(
                f"Apache Kafka {version} knows no transaction.version {transaction_version}: "
                "leave transaction_version out, or use 4.0 or newer."
            )
        if security != NO_SECURITY and _release(version) < KRAFT_SINCE:
            # Before 2.7 certificates cannot be given as PEM, and SCRAM users are made in ZooKeeper by another tool.
            raise ConfigError(f"Apache Kafka {version} is started here without security only: use 3.3 or newer.")
        self.version = version
        self.security = security
        self.node_count = nodes
        self._transaction_version = transaction_version
        self._config = dict(config or {})
        self._jvm = tuple(jvm)
        self._log_level = log_level
        self._ready_timeout_s = ready_timeout_s
        self._keep = keep
        self._folder: Path | None = None
        self._nodes: list[Node] = []
        self._quorum: _Kraft | _ZooKeeperQuorum | None = None
        self._owner_pid = 0

    def __repr__(self) -> str:
        return f"ApacheKafka({self.version!r}, nodes={self.node_count})"

    @property
    def bootstrap(self) -> str:
        """`host:port[,host:port...]` of the plaintext listeners."""
        return self.bootstrap_for("PLAINTEXT")

    def bootstrap_for(self, protocol: Protocol) -> str:
        """The same for another listener of `security`."""
        if protocol not in self.security.protocols:
            raise ConfigError(f"This broker has no {protocol} listener: its `security` asks for none.")
        return ",".join(f"{HOST}:{node.ports[protocol]}" for node in self.nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        if not self._nodes:
            raise InvalidState("Apache Kafka is not started: use it as a context manager or call start().")
        return tuple(self._nodes)

    def node(self, node_id: int) -> Node:
        """The node with that id; ids count from 0 and are the broker ids too."""
        return self.nodes[node_id]

    @property
    def folder(self) -> Path:
        """The folder with each node's settings, data and log."""
        if self._folder is None:
            raise InvalidState("Apache Kafka is not started: use it as a context manager or call start().")
        return self._folder

    def __enter__(self) -> ApacheKafka:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Fetch if needed, format, start all nodes, and return when each of them knows all the others."""
        if self._nodes:
            raise InvalidState("This Apache Kafka is already started.")
        libraries = kafka_jars(self.version)
        self._owner_pid = os.getpid()
        atexit.register(self.close)
        try:
            for attempt in range(1, PORT_ATTEMPTS + 1):
                try:
                    return self._start_once(libraries)
                except PortTaken:
                    self._discard()
                    if attempt == PORT_ATTEMPTS:
                        raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all nodes and delete the data. Harmless when repeated."""
        if self._owner_pid != os.getpid():  # a forked child inherits this object, not the processes
            return
        atexit.unregister(self.close)
        self._discard()

    def _discard(self) -> None:
        for node in self._nodes:
            node.kill()
        self._nodes = []
        if self._quorum:
            self._quorum.end()
        self._quorum = None
        if self._folder and not self._keep:
            shutil.rmtree(self._folder)
        self._folder = None

    def _start_once(self, libraries: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="semel-kafka-"))
        protocols = self.security.protocols
        ports = iter(_free_ports(self.node_count * (len(protocols) + 1)))
        by_node: list[dict[Protocol, int]] = [
            {protocol: next(ports) for protocol in protocols} for _ in range(self.node_count)
        ]
        quorum = self._quorum = self._make_quorum(libraries, list(ports))
        self._nodes = [
            Node(
                node_id,
                folder=self._folder / f"node-{node_id}",
                jars=libraries,
                ports=node_ports,
                properties=self._properties(node_id, node_ports, quorum),
                jvm=self._jvm,
                log_level=self._log_level,
                ready_timeout_s=self._ready_timeout_s,
            )
            for node_id, node_ports in enumerate(by_node)
        ]
        deadline = time.monotonic() + self._ready_timeout_s
        quorum.prepare(self._nodes, deadline)
        for node in self._nodes:
            node.launch()
        for node in self._nodes:
            node.wait_ready(set(range(self.node_count)), deadline)

    def _make_quorum(self, libraries: Path, ports: list[int]) -> _Kraft | _ZooKeeperQuorum:
        if _release(self.version) < KRAFT_SINCE:
            folder = self.folder / "zookeeper"
            return _ZooKeeperQuorum(
                ZooKeeper(folder=folder, port=ports[0], jars=libraries, jvm=self._jvm, log_level=self._log_level)
            )
        arguments = self.security.format_arguments()
        if self._transaction_version is not None and _release(self.version) >= (4, 0):
            arguments += ["--feature", f"transaction.version={self._transaction_version}"]
        return _Kraft(ports, arguments)

    def _properties(
        self, node_id: int, ports: Mapping[Protocol, int], quorum: _Kraft | _ZooKeeperQuorum
    ) -> dict[str, str]:
        listeners = {**ports, **quorum.listeners(node_id)}
        protocols = {name: name if name in ports else "PLAINTEXT" for name in listeners}
        return {
            **quorum.properties(node_id),
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in listeners.items()),
            "listener.security.protocol.map": ",".join(f"{name}:{value}" for name, value in protocols.items()),
            "log.dirs": str(self.folder / f"node-{node_id}" / "data"),
            **quick_settings(self.node_count),
            **self.security.properties(),
            **self._config,
        }


class _Kraft:
    """The nodes are controllers too and agree among themselves, on storage that is formatted beforehand."""

    def __init__(self, controller_ports: Sequence[int], format_arguments: Sequence[str]) -> None:
        self._ports = controller_ports
        self._format_arguments = format_arguments

    def listeners(self, node_id: int) -> dict[str, int]:
        return {"CONTROLLER": self._ports[node_id]}

    def properties(self, node_id: int) -> dict[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": str(node_id),
            "controller.quorum.voters": ",".join(f"{voter}@{HOST}:{port}" for voter, port in enumerate(self._ports)),
            "controller.listener.names": "CONTROLLER",
        }

    def prepare(self, nodes: Sequence[Node], deadline: float) -> None:
        arguments = [f"--cluster-id={_cluster_id()}", *self._format_arguments]
        for node in nodes:
            node.begin_format(arguments)
        for node in nodes:
            node.finish_format()

    def end(self) -> None:
        """It ends with the nodes."""


class _ZooKeeperQuorum:
    """One ZooKeeper keeps what the cluster has agreed on and elects the controller: releases before 3.3."""

    def __init__(self, zookeeper: ZooKeeper) -> None:
        self._zookeeper = zookeeper

    def listeners(self, node_id: int) -> dict[str, int]:
        return {}

    def properties(self, node_id: int) -> dict[str, str]:
        return {
            "broker.id": str(node_id),
            "zookeeper.connect": f"{HOST}:{self._zookeeper.port}",
            "zookeeper.connection.timeout.ms": "30000",
        }

    def prepare(self, nodes: Sequence[Node], deadline: float) -> None:
        self._zookeeper.start(deadline)

    def end(self) -> None:
        self._zookeeper.kill()


def quick_settings(nodes: int) -> dict[str, str]:
    """Broker settings that make tests quick: few internal partitions, no waiting for company, time-outs seen soon."""
    replicas, in_sync = str(min(nodes, 3)), "1" if nodes < 3 else "2"
    session_ms = "3000" if nodes == 1 else "6000"
    return {
        "auto.create.topics.enable": "false",
        "num.partitions": "1",
        "offsets.topic.num.partitions": "4",
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.num.partitions": "4",
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "100",
        "group.consumer.min.heartbeat.interval.ms": "100",
        "group.consumer.heartbeat.interval.ms": "500",
        "group.consumer.min.session.timeout.ms": "1000",
        "group.consumer.session.timeout.ms": "6000",
        "broker.heartbeat.interval.ms": "500",
        # A killed broker may register again only when its old session has expired, so this is what a restart waits for.
        "broker.session.timeout.ms": session_ms,
        "zookeeper.session.timeout.ms": session_ms,
        "log.retention.check.interval.ms": "3600000",
        "log.cleaner.dedupe.buffer.size": "8388608",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "background.threads": "4",
    }


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _cluster_id() -> str:
    # Sixteen bytes in URL-safe base64; a leading "-" would be taken for an option, so the first letter is fixed.
    return "S" + base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")[1:]


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, from below the range that outgoing connections use.

    A client that keeps calling a killed broker's port within that range would sooner or later be given the very port as
    its own end, connect to itself, and keep the broker from coming back.
    """
    candidates = list(range(10_000, _outgoing_ports_begin()))
    random.SystemRandom().shuffle(candidates)
    free: list[int] = []
    with ExitStack() as held:
        for port in candidates:
            if len(free) == count:
                return free
            probe = held.enter_context(socket.socket())
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            free.append(port)
        for _ in range(count - len(free)):  # such a range leaves no room below: any free port, then
            probe = held.enter_context(socket.socket())
            probe.bind((HOST, 0))
            free.append(probe.getsockname()[1])
        return free


def _outgoing_ports_begin() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        return 32_768
