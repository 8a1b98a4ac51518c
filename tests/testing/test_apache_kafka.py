"""A real Apache Kafka starts, survives what tests do to it, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from kio.schema.api_versions.v3.request import ApiVersionsRequest
from kio.schema.api_versions.v3.response import ApiVersionsResponse
from process_state import is_gone, processes_in, wait_until

from semel.errors import BrokerUnreachable, ConfigError, InvalidState
from semel.testing import apache_kafka
from semel.testing.apache_kafka import LATEST, OLD, OLDEST, ApacheKafka, Protocol, Security, Tls
from semel.testing.certificates import CertificateFiles, make_certificates
from semel.testing.exchange import create_topic, exchange, live_brokers, parse_bootstrap

pytestmark = pytest.mark.conformance

STARTS_AND_WAITS = """
import sys, time
from semel.testing.apache_kafka import ApacheKafka
kafka = ApacheKafka(sys.argv[1])
kafka.start()
print(kafka.folder, flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


def transaction_version(kafka: ApacheKafka) -> int:
    request = ApiVersionsRequest(client_software_name="semel", client_software_version="0")
    answer = exchange(parse_bootstrap(kafka.bootstrap)[0], request, ApiVersionsResponse)
    levels = {feature.name: int(feature.max_version_level) for feature in answer.finalized_features}
    return levels.get("transaction.version", 0)


def produce(bootstrap: str, topic: str, values: list[bytes]) -> None:
    outcomes: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=lambda error, _: outcomes.append(error))
    assert producer.flush(60) == 0
    assert outcomes == [None] * len(values)


def consume(bootstrap: str, topic: str, count: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[bytes] = []
    deadline = time.monotonic() + 60
    while len(values) < count and time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            values.append(message.value() or b"")
    consumer.close()
    return values


@pytest.mark.parametrize(
    ("version", "asked", "expected"),
    [(LATEST, None, 2), (LATEST, 1, 1), (LATEST, 0, 0), (OLD, None, 0), (OLD, 0, 0), (OLDEST, None, 0)],
)
def test_each_version_starts_with_the_transaction_version_asked_for(
    version: str, asked: int | None, expected: int
) -> None:
    """One node of each version is ready for use and has finalized the transaction protocol wanted of it."""
    with ApacheKafka(version, transaction_version=asked) as kafka:
        create_topic(kafka.bootstrap, "topic", partitions=3)
        produce(kafka.bootstrap, "topic", [b"value"])
        assert transaction_version(kafka) == expected


def test_old_version_refuses_a_transaction_version_it_does_not_know() -> None:
    """The contradiction is told before anything is started."""
    with pytest.raises(ConfigError, match=r"3\.9\.2 knows no transaction\.version 2"):
        ApacheKafka(OLD, transaction_version=2)


def test_version_with_zookeeper_refuses_secure_listeners() -> None:
    """What is not prepared for such a version is told before anything is started."""
    with pytest.raises(ConfigError, match=r"2\.5\.1 is started here without security only"):
        ApacheKafka(OLDEST, security=Security(plain={"ann": "ann-secret"}))


# With ZooKeeper only where everything is tried: `make conformance-whole`.
QUORUMS = {"kraft": LATEST, **({"zookeeper": OLDEST} if os.environ.get("SEMEL_WHOLE") else {})}
each_quorum = pytest.mark.parametrize("version", QUORUMS.values(), ids=QUORUMS)


@each_quorum
def test_nothing_is_left_after_close(version: str) -> None:
    """Processes and data are gone after the block, and the object says that it is not started."""
    with ApacheKafka(version) as kafka:
        folder = kafka.folder
        pids = processes_in(folder)
        assert kafka.node(0).pid in pids
        assert len(pids) == (2 if version == OLDEST else 1)
        assert (folder / "node-0" / "data").is_dir()
    assert all(is_gone(pid) for pid in pids)
    assert not folder.exists()
    with pytest.raises(InvalidState):
        _ = kafka.bootstrap


@each_quorum
def test_killed_node_comes_back_with_its_data(version: str) -> None:
    """After SIGKILL a node starts again on the same port and data; after an orderly stop too."""
    with ApacheKafka(version) as kafka:
        create_topic(kafka.bootstrap, "topic")
        node, bootstrap = kafka.node(0), kafka.bootstrap
        values = [b"%d" % number for number in range(300)]
        produce(bootstrap, "topic", values[:100])
        first_pid = node.pid
        node.kill()
        assert is_gone(first_pid)
        with pytest.raises(BrokerUnreachable):
            live_brokers(parse_bootstrap(bootstrap)[0])
        node.start()
        assert node.pid != first_pid
        produce(bootstrap, "topic", values[100:200])
        node.stop()
        node.start()
        produce(bootstrap, "topic", values[200:])
        assert kafka.bootstrap == bootstrap
        assert consume(bootstrap, "topic", len(values)) == values


@each_quorum
def test_cluster_outlives_one_of_its_nodes(version: str) -> None:
    """Three nodes know each other; with one of them killed the others go on, and it joins again."""
    with ApacheKafka(version, nodes=3) as kafka:
        addresses = parse_bootstrap(kafka.bootstrap)
        assert [live_brokers(address) for address in addresses] == [{0, 1, 2}] * 3
        create_topic(kafka.bootstrap, "topic", replication=3, config={"min.insync.replicas": "2"})
        produce(kafka.bootstrap, "topic", [b"before"])
        kafka.node(1).kill()
        wait_until(lambda: live_brokers(addresses[0]) == {0, 2})
        produce(kafka.bootstrap, "topic", [b"without"])
        kafka.node(1).start()
        wait_until(lambda: live_brokers(addresses[0]) == {0, 1, 2})
        produce(kafka.bootstrap, "topic", [b"after"])
        assert consume(kafka.bootstrap, "topic", 3) == [b"before", b"without", b"after"]


def test_settings_of_the_user_win_over_the_built_in_ones() -> None:
    """A setting given in `config` replaces the one chosen for tests."""
    with ApacheKafka(config={"auto.create.topics.enable": "true"}) as kafka:
        produce(kafka.bootstrap, "made-by-writing-to-it", [b"value"])
        assert consume(kafka.bootstrap, "made-by-writing-to-it", 1) == [b"value"]


def test_refused_setting_is_reported_with_the_log() -> None:
    """A broker that cannot start is an error that shows why, not a time-out, and leaves nothing behind."""
    with pytest.raises(ConfigError, match=r"could not be formatted(?s:.*)num\.io\.threads"):
        ApacheKafka(config={"num.io.threads": "0"}).start()
    kafka = ApacheKafka(config={"authorizer.class.name": "there.is.no.such.Authorizer"})
    with pytest.raises(BrokerUnreachable, match=r"ended with code 1(?s:.*)there\.is\.no\.such\.Authorizer"):
        kafka.start()
    with pytest.raises(InvalidState):
        _ = kafka.folder


@each_quorum
def test_port_lost_to_another_process_is_no_failure(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first start other ports are taken; a node that comes back waits for its own port."""
    real, calls = apache_kafka._free_ports, []
    unlucky = 1 if version == OLDEST else 0  # ZooKeeper's port comes behind the node's

    def unlucky_once(count: int) -> list[int]:
        calls.append(count)
        ports = real(count)
        if len(calls) == 1:
            ports[unlucky] = taken.getsockname()[1]
        return ports

    monkeypatch.setattr(apache_kafka, "_free_ports", unlucky_once)
    with socket.create_server(("127.0.0.1", 0)) as taken, ApacheKafka(version) as kafka:
        assert len(calls) == 2
        node, address = kafka.node(0), parse_bootstrap(kafka.bootstrap)[0]
        node.kill()
        with socket.create_server(address):
            revival = threading.Thread(target=node.start)
            revival.start()
            wait_until(lambda: "Address already in use" in node.log_tail(200))
        revival.join(60)
        assert live_brokers(address) == {0}


@pytest.mark.parametrize("end", ["killed", "exits"])
@each_quorum
def test_broker_ends_with_its_parent(version: str, end: str) -> None:
    """A parent that is killed with SIGKILL takes the broker with it; one that forgets to close it cleans up at exit."""
    command = [sys.executable, "-c", STARTS_AND_WAITS, version, "wait" if end == "killed" else "exit"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        folder = Path(parent.stdout.readline().strip())
        if end == "killed":
            assert processes_in(folder)
            os.kill(parent.pid, signal.SIGKILL)
        parent.wait(60)
    wait_until(lambda: not processes_in(folder), timeout_s=10)
    if end == "exits":
        assert not folder.exists()
    else:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def secured() -> Iterator[tuple[ApacheKafka, CertificateFiles]]:
    """A broker with every listener, where `SSL` asks clients for a certificate."""
    certificates = make_certificates()
    tls = Tls(server=certificates.server, ca_pem=certificates.ca_pem, client_auth="required")
    security = Security(tls=tls, plain={"ann": "ann-secret"}, scram={"bob": "bob-secret"})
    with ApacheKafka(security=security) as kafka:
        yield kafka, certificates.write(kafka.folder / "client")


def first_outcome(kafka: ApacheKafka, protocol: Protocol, settings: dict[str, str]) -> int | None:
    """The code of the first error that the client reports: of an unknown topic once the broker has let it in."""
    errors: list[KafkaError] = []
    bootstrap = kafka.bootstrap_for(protocol)
    client = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "security.protocol": protocol,
            "group.id": "login",
            "error_cb": errors.append,
            "log_level": 0,
            **settings,
        }
    )
    client.subscribe(["topic"])
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not errors:
            message = client.poll(0.1)
            if message is not None:
                error = message.error()
                return error.code() if error else None
        return errors[0].code()
    finally:
        client.close()


def sasl(mechanism: str, user: str, password: str) -> dict[str, str]:
    return {"sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": password}


LOGINS = [sasl("PLAIN", "ann", "ann-secret")] + [
    sasl(mechanism, "bob", "bob-secret") for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
]


@pytest.mark.parametrize("login", LOGINS, ids=lambda login: login["sasl.mechanism"])
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_right_password_is_let_in_and_a_wrong_one_is_not(
    secured: tuple[ApacheKafka, CertificateFiles], protocol: Protocol, login: dict[str, str]
) -> None:
    """Each SASL listener knows its users by each mechanism."""
    kafka, files = secured
    trust = {"ssl.ca.location": str(files.ca)} if protocol == "SASL_SSL" else {}
    topic_is_unknown = KafkaError.UNKNOWN_TOPIC_OR_PART
    assert first_outcome(kafka, protocol, login | trust) == topic_is_unknown
    wrong = login | trust | {"sasl.password": "guess"}
    assert first_outcome(kafka, protocol, wrong) == KafkaError._AUTHENTICATION


def test_mutual_tls_trusts_only_its_own_authority(secured: tuple[ApacheKafka, CertificateFiles]) -> None:
    """The client's certificate opens the TLS listener; none, a stranger's, or a stranger as authority do not."""
    kafka, files = secured
    ours = {"ssl.certificate.location": str(files.client_certificate), "ssl.key.location": str(files.client_key)}
    theirs = {"ssl.certificate.location": str(files.stranger_certificate), "ssl.key.location": str(files.stranger_key)}
    trust, mistrust = {"ssl.ca.location": str(files.ca)}, {"ssl.ca.location": str(files.stranger_ca)}
    assert first_outcome(kafka, "SSL", trust | ours) == KafkaError.UNKNOWN_TOPIC_OR_PART
    for refused in (trust, trust | theirs, mistrust | ours):
        assert first_outcome(kafka, "SSL", refused) in (KafkaError._SSL, KafkaError._TRANSPORT)


def test_listener_that_was_not_asked_for_is_an_error(secured: tuple[ApacheKafka, CertificateFiles]) -> None:
    """Asking for the address of an absent listener is told plainly."""
    kafka, _ = secured
    kafka_without = ApacheKafka()
    assert kafka.bootstrap_for("PLAINTEXT") == kafka.bootstrap
    with pytest.raises(ConfigError, match="no SASL_SSL listener"):
        kafka_without.bootstrap_for("SASL_SSL")
