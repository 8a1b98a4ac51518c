"""Semel's producer and fetcher over every kind of listener: TLS, mutual TLS, and SASL with and without TLS."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator

import pyarrow as pa
import pytest
from observer import wait_until_settled
from secure_kafka import MECHANISMS, USERS, SecureKafka, Settings, login, start_secure_kafka
from targets import Target

from semel.client.connection import Connection
from semel.client.fetcher import Fetcher
from semel.client.producer import Producer
from semel.client.settings import parse_config
from semel.errors import AuthenticationFailed
from semel.testing.apache_kafka import Protocol
from semel.testing.exchange import create_topic
from semel.testing.security import Security
from semel.wire import Api

PARTITIONS = 3
SEED = 61


@pytest.fixture(scope="module")
def secure(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    """A broker that looks at client certificates where there are some, and insists on logins."""
    with start_secure_kafka(target, tmp_path_factory.mktemp("tls"), client_auth="requested") as secure:
        yield secure


@pytest.fixture
def topic(secure: SecureKafka) -> str:
    name = f"topic-{uuid.uuid4().hex[:12]}"
    create_topic(secure.broker.bootstrap, name, partitions=PARTITIONS)
    return name


def check_round_trip(secure: SecureKafka, settings: Settings, topic: str) -> None:
    """A transaction over some megabytes, written and read with these settings alone.

    So much that answers arrive in pieces: what TLS has decrypted already is not seen by waiting on the socket.
    """
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    values = [rng.randbytes(rng.randrange(20_000)) for _ in range(400)]
    with Producer(settings, transactional_id=f"{topic}-writer") as producer, producer.transaction():
        producer.send_table(topic, pa.table({"value": values[:300], "key": [b"%d" % n for n in range(300)]}))
        for value in values[300:]:
            producer.send(topic, value)
    # A commit is certain before its markers are everywhere, and the end for a reader is where the markers are.
    wait_until_settled(secure.broker.bootstrap, topic, PARTITIONS)
    with Fetcher(settings) as fetcher:
        fetcher.assign({(topic, partition): "earliest" for partition in range(PARTITIONS)})
        read = [
            value for table in fetcher.read_until(fetcher.end_offsets()) for value in table.column("value").to_pylist()
        ]
    assert sorted(read) == sorted(values)


def test_tls_works(secure: SecureKafka, topic: str) -> None:
    """The authority's file is all that a TLS listener needs."""
    check_round_trip(secure, secure.settings("SSL"), topic)


def test_mutual_tls_works(secure: SecureKafka, topic: str) -> None:
    """The client's certificate is shown and accepted; a stranger's is shown and refused."""
    check_round_trip(secure, secure.settings("SSL") | secure.certificate, topic)
    stranger: Settings = {
        "ssl.certificate.location": str(secure.files.stranger_certificate),
        "ssl.key.location": str(secure.files.stranger_key),
    }
    with pytest.raises(AuthenticationFailed, match=r"ssl\.certificate\.location"):
        Producer(secure.settings("SSL") | stranger)


def test_mutual_tls_works_by_the_names_of_the_java_client(
    secure: SecureKafka, topic: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """PEM stores as Java's client takes them: one file with key and certificate, one with the authority."""
    keystore = tmp_path_factory.mktemp("store") / "keystore.pem"
    keystore.write_text(secure.files.client_key.read_text() + secure.files.client_certificate.read_text())
    stores: Settings = {
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(secure.files.ca),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
    }
    check_round_trip(secure, secure.settings("SSL", trust=False) | stores, topic)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_sasl_works(protocol: Protocol, mechanism: str, secure: SecureKafka, topic: str) -> None:
    """Each mechanism logs in, with and without TLS around it."""
    check_round_trip(secure, secure.settings(protocol) | login(mechanism), topic)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_login_works_from_the_line_of_the_java_client(mechanism: str, secure: SecureKafka, topic: str) -> None:
    """`sasl.jaas.config` alone carries user and password."""
    username, password = USERS[mechanism]
    module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
    jaas = f'org.apache.kafka.common.security.{module} required username="{username}" password="{password}";'
    given: Settings = {"sasl.mechanism": mechanism, "sasl.jaas.config": jaas}
    check_round_trip(secure, secure.settings("SASL_SSL") | given, topic)


LIFETIME_S = 2.0


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_login_that_ends_is_renewed_on_the_same_connection(mechanism: str, target: Target) -> None:
    """KIP-368: the broker closes a connection whose session is over, and the client never lets it come to that."""
    username, password = USERS[mechanism]
    users = {"plain" if mechanism == "PLAIN" else "scram": {username: password}}
    with target.start(Security(session_lifetime_ms=int(LIFETIME_S * 1000), **users)) as broker:  # type: ignore[arg-type]
        config = parse_config(
            {
                "bootstrap.servers": broker.bootstrap_for("SASL_PLAINTEXT"),
                "security.protocol": "SASL_PLAINTEXT",
                **login(mechanism),
            }
        ).client
        connection = Connection(*config.bootstrap[0], config)
        ends = time.monotonic() + 2.5 * LIFETIME_S
        while time.monotonic() < ends:
            connection.call(Api.API_VERSIONS, client_software_name="semel", client_software_version="1")
        connection.close()
