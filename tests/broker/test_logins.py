"""Logins over sockets: failed ones are slow, counted and in the log; an old one ends; a revoked one is over."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest

import semel
from semel.broker.credentials import CredentialChange
from semel.broker.listeners import ListenerSettings
from semel.client.config import ClientConfig, SecurityConfig
from semel.client.connection import Connection
from semel.errors import AuthenticationFailed, ConnectionLost, SemelError
from semel.testing.embedded import EmbeddedBroker
from semel.testing.manual_clock import ManualClock
from semel.wire import Api, build, encode_request

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
LOGINS = ListenerSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanisms=MECHANISMS)
USERS = {"ann": "secret"}
DELAY = "connection.failed.authentication.delay.ms"
ANY = {"key_type": 0, "key": "some group"}
"""A request that any client may make."""


def start(clock: ManualClock | None = None, **config: str) -> EmbeddedBroker:
    settings = {name.replace("_", "."): value for name, value in config.items()}
    return EmbeddedBroker(listeners=[LOGINS], plain_users=USERS, scram_users=USERS, config=settings, clock=clock)


def address(broker: EmbeddedBroker) -> tuple[str, int]:
    host, _, port = broker.bootstrap.rpartition(":")
    return host, int(port)


def connect(
    broker: EmbeddedBroker, *, password: str = "secret", username: str = "ann", mechanism: str = "PLAIN"
) -> Connection:
    security = SecurityConfig(protocol="SASL_PLAINTEXT", sasl_mechanism=mechanism, username=username, password=password)
    return Connection(*address(broker), ClientConfig(bootstrap=(address(broker),), security=security))


def settings_of(broker: EmbeddedBroker, mechanism: str = "PLAIN") -> dict[str, object]:
    return {
        "bootstrap.servers": broker.bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": "ann",
        "sasl.password": "secret",
    }


def test_a_failed_login_is_answered_late_and_others_are_served_meanwhile() -> None:
    """Kafka's delay: it holds up the guess, not the broker."""
    clock = ManualClock()
    with start(clock, connection_failed_authentication_delay_ms="5000") as broker:
        refused: list[SemelError] = []

        def guess() -> None:
            try:
                connect(broker, password="wrong")
            except SemelError as error:
                refused.append(error)

        guesser = threading.Thread(target=guess)
        guesser.start()
        deadline = time.monotonic() + 20
        while broker.metrics.failed_logins == 0:
            assert time.monotonic() < deadline
        connect(broker).close()
        clock.advance(ms=4_900)
        assert guesser.is_alive()
        assert not refused
        clock.advance(ms=200)
        guesser.join(20)
        assert isinstance(refused[0], AuthenticationFailed)


def test_without_a_setting_the_delay_is_that_of_kafka() -> None:
    """100 ms for each guess; nothing for those who know the password."""
    with start() as broker:
        began = time.monotonic()
        with pytest.raises(AuthenticationFailed):
            connect(broker, password="wrong")
        assert time.monotonic() - began >= 0.1
        assert broker.call(lambda: broker.broker.settings.values[DELAY]) == 100


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_failed_logins_are_counted_and_in_the_log_without_secrets(
    mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer, the mechanism and the user if there is one; never a password, nor a name that may be one."""
    with start(connection_failed_authentication_delay_ms="0") as broker, caplog.at_level(logging.WARNING):
        for username in ("ann", "my-password-by-mistake\nforged line"):
            with pytest.raises(AuthenticationFailed):
                connect(broker, username=username, password="hunter22", mechanism=mechanism)
        assert broker.metrics.failed_logins == 2
    lines = [record.getMessage() for record in caplog.records if "login" in record.getMessage()]
    assert len(lines) == 2
    assert all("/127.0.0.1" in line and mechanism in line for line in lines)
    assert "'ann'" in lines[0]
    assert "unknown user" in lines[1]
    assert not any("hunter22" in line or "my-password" in line or "\n" in line for line in lines)


def test_bare_tokens_are_slowed_and_counted_too() -> None:
    """The first form of the handshake has no answer for a refusal: the connection ends, and not at once."""
    clock = ManualClock()
    with start(clock) as broker, socket.create_connection(address(broker), 20) as peer:
        peer.settimeout(20)
        peer.sendall(b"".join(encode_request(build(Api.SASL_HANDSHAKE, 0, mechanism="PLAIN"), 1, "old")))
        assert peer.recv(1000)
        token = b"\0ann\0wrong"
        peer.sendall(len(token).to_bytes(4, "big") + token)
        deadline = time.monotonic() + 20
        while broker.metrics.failed_logins == 0:
            assert time.monotonic() < deadline
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        peer.settimeout(20)
        clock.advance(ms=100)
        assert peer.recv(1) == b""


def test_a_mechanism_that_is_not_offered_counts_as_a_failed_login() -> None:
    """A client that tries passwords one after another is logged."""
    with start(connection_failed_authentication_delay_ms="0") as broker:
        with socket.create_connection(address(broker), 20) as peer:
            peer.sendall(b"".join(encode_request(build(Api.SASL_HANDSHAKE, 1, mechanism="GSSAPI"), 1, "c")))
            while peer.recv(1000):
                pass
        assert broker.metrics.failed_logins == 1


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_login_lasts_as_long_as_the_setting_says(mechanism: str) -> None:
    """connections.max.reauth.ms: after that only a new login is taken on the connection, and others are unaffected."""
    clock = ManualClock()
    with start(clock, connections_max_reauth_ms="60000") as broker:
        connection = connect(broker, mechanism=mechanism)
        clock.advance(ms=59_000)
        assert connection.call(Api.FIND_COORDINATOR, **ANY).port
        clock.advance(ms=1_000)
        with pytest.raises(ConnectionLost):
            connection.call(Api.FIND_COORDINATOR, **ANY)
        connection.close()
        assert broker.metrics.expired_logins == 1


def test_our_client_logs_in_again_before_its_time_is_over() -> None:
    """On the same connection, as Java's client does (KIP-368): no request is lost to the end of a session."""
    now = [0.0]
    clock = ManualClock()
    with start(clock, connections_max_reauth_ms="60000") as broker:
        security = SecurityConfig(
            protocol="SASL_PLAINTEXT", sasl_mechanism="SCRAM-SHA-256", username="ann", password="secret"
        )
        config = ClientConfig(bootstrap=(address(broker),), security=security)
        connection = Connection(*address(broker), config, clock=lambda: now[0])
        for _ in range(5):
            now[0] += 58
            clock.advance(ms=58_000)
            assert connection.call(Api.FIND_COORDINATOR, **ANY).port
        connection.close()
        assert broker.metrics.connections_opened == 1
        assert broker.metrics.requests[Api.SASL_HANDSHAKE.name] == 6
        assert broker.metrics.expired_logins == 0


def test_a_client_whose_password_was_taken_away_is_out_when_its_login_is_over() -> None:
    """The user is deleted while a connection is open: the connection ends with its session, and none is made again."""
    now = [0.0]
    clock = ManualClock()
    with start(clock, connections_max_reauth_ms="60000", connection_failed_authentication_delay_ms="0") as broker:
        security = SecurityConfig(protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", username="ann", password="secret")
        config = ClientConfig(bootstrap=(address(broker),), security=security)
        connection = Connection(*address(broker), config, clock=lambda: now[0])
        deletions = [CredentialChange("ann", mechanism, None) for mechanism in MECHANISMS[1:]]
        broker.call(lambda: broker.broker.credentials.change(deletions))
        now[0] += 58
        clock.advance(ms=58_000)
        with pytest.raises(AuthenticationFailed):
            connection.call(Api.FIND_COORDINATOR, **ANY)
        assert not connection.is_open
        with pytest.raises(AuthenticationFailed):
            connect(broker)


def test_whole_clients_work_through_many_short_sessions() -> None:
    """A session of a second, and a producer that goes on for several: nothing is lost, and nobody notices."""
    with start(connections_max_reauth_ms="1000") as broker:
        with semel.Admin(settings_of(broker)) as admin:
            admin.create_topics("orders")
        with semel.Producer(settings_of(broker)) as producer:
            deadline = time.monotonic() + 3
            sent = 0
            while time.monotonic() < deadline:
                producer.send("orders", b"%d" % sent)
                producer.flush()
                sent += 1
        with semel.Fetcher(settings_of(broker, "SCRAM-SHA-512")) as fetcher:
            fetcher.assign({("orders", 0): "earliest"})
            tables = list(fetcher.read_until(fetcher.end_offsets()))
        assert [int(value) for table in tables for value in table["value"].to_pylist()] == list(range(sent))
        assert broker.metrics.requests[Api.SASL_HANDSHAKE.name] > broker.metrics.connections_opened
