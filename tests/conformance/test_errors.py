"""What goes wrong on a user's first day gives one typed error, soon: what happened, what of the data, what to do."""

from __future__ import annotations

import inspect
import pickle
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import UnionType
from typing import get_args

import pyarrow as pa
import pytest
from fake_server import Answer, broker_before_2_4, broker_with, fake_server, speak_http
from secure_kafka import MECHANISMS, SecureKafka, Settings, login, start_secure_kafka
from targets import Target

from semel import errors
from semel.client.fetcher import Fetcher
from semel.client.producer import Outcome, Producer
from semel.errors import (
    AuthenticationFailed,
    BrokerUnreachable,
    CommitUnknown,
    ConnectionLost,
    KafkaError,
    RecordTooLarge,
    SemelError,
    UnknownTopic,
    UnsupportedByBroker,
    WireError,
)
from semel.testing.apache_kafka import Protocol
from semel.testing.exchange import create_topic
from semel.wire import Api, ErrorCode

SOON_S = 6.0
"""Missing topics and brokers are given three seconds to appear; nothing here may take much longer."""
NOBODY_LISTENS = "127.0.0.1:1"


def failure_of(call: Callable[[], object], kind: type[SemelError] | UnionType, *words: str) -> SemelError:
    """The error of `call`, checked for all that every error a user meets must be."""
    started = time.monotonic()
    with pytest.raises(SemelError) as caught:
        call()
    took_s = time.monotonic() - started
    error, text = caught.value, str(caught.value)
    print(f"{took_s:.1f} s: {type(error).__name__}: {text}")
    assert type(error) in (get_args(kind) or (kind,))
    assert took_s < SOON_S
    for word in words:
        assert word in text
    assert len(re.findall(r"[.!?](?=\s|$)", text)) <= 2, "one sentence or two"
    assert len(text) < 350
    # Below it there is at most what the operating system or OpenSSL said.
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert cause is None or (isinstance(cause, OSError) and not isinstance(cause, SemelError))
    assert cause is None or (cause.__cause__ or cause.__context__) is None
    check_pickles(error)
    return error


def check_pickles(error: SemelError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert vars(copy) == vars(error)


def make_producer(settings: Settings) -> Callable[[], None]:
    return lambda: Producer(settings).close()


def make_transactional_producer(settings: Settings) -> Callable[[], None]:
    return make_producer(settings | {"transactional.id": f"errors-{uuid.uuid4().hex}"})


def read(settings: Settings, topic: str = "any", partition: int = 0) -> Callable[[], None]:
    def call() -> None:
        with Fetcher(settings) as fetcher:
            fetcher.assign({(topic, partition): "earliest"})
            fetcher.read(1_000)

    return call


def write(settings: Settings, topic: str, value: bytes = b"value") -> Callable[[], None]:
    def call() -> None:
        with Producer(settings) as producer:
            producer.send(topic, value)

    return call


each_client = pytest.mark.parametrize("client", [make_producer, make_transactional_producer, read])
Client = Callable[[Settings], Callable[[], None]]


# -- every exception ---------------------------------------------------------------------------------------------------

EXCEPTIONS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SemelError)]


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_every_exception_survives_pickling(kind: type[SemelError]) -> None:
    """Type, message and fields are the same on the other side of a process boundary."""
    error = kind("What happened.")
    if isinstance(error, KafkaError):
        error = type(error)("What happened.", code=ErrorCode.producer_fenced, is_fatal=True)
        error.is_earlier_try_open = True
        assert error.code is ErrorCode.producer_fenced
    check_pickles(error)


# -- not a broker, or not one for us -----------------------------------------------------------------------------------


@each_client
def test_unreachable_broker(client: Client) -> None:
    """Where nobody listens, a client gives up within seconds and names the settings that hold addresses."""
    settings: Settings = {"bootstrap.servers": NOBODY_LISTENS}
    failure_of(
        client(settings),
        BrokerUnreachable,
        NOBODY_LISTENS,
        "nothing was sent",
        "bootstrap.servers",
        "advertised.listeners",
    )


def test_unknown_host() -> None:
    """A name that cannot be resolved is told with the setting it stands in."""
    failure_of(
        make_producer({"bootstrap.servers": "no-such-host.invalid:9092"}),
        BrokerUnreachable,
        "no-such-host.invalid:9092",
        "bootstrap.servers",
    )


def test_one_reachable_address_is_enough(secure: SecureKafka) -> None:
    """Addresses that do not answer are passed over, without an error."""
    bootstrap = f"{NOBODY_LISTENS},{secure.broker.bootstrap}"
    make_producer({"bootstrap.servers": bootstrap})()


@each_client
def test_port_that_speaks_http(client: Client) -> None:
    """A web server's answer is recognised for what it is."""
    with fake_server(speak_http) as address:
        failure_of(
            client({"bootstrap.servers": address}), WireError, address, "HTTP", "nothing was sent", "bootstrap.servers"
        )


def test_port_that_says_nothing() -> None:
    """A server that hangs up, or takes the connection and stays silent, does not hold a client for long."""
    with fake_server(lambda request: b"") as address:
        failure_of(make_producer({"bootstrap.servers": address}), BrokerUnreachable, address, "security.protocol")
    with fake_server(lambda request: time.sleep(0.6) or b"") as address:
        settings: Settings = {"bootstrap.servers": address, "socket.connection.setup.timeout.ms": 500}
        failure_of(make_producer(settings), BrokerUnreachable, address, "socket.connection.setup.timeout.ms")


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        pytest.param(broker_before_2_4, ["does not know InitProducerId"], id="before 2.4"),
        pytest.param(
            broker_with({Api.API_VERSIONS: (0, 3), Api.METADATA: (0, 9), Api.INIT_PRODUCER_ID: (0, 2)}),
            ["InitProducerId versions 0-2"],
            id="2.4",
        ),
    ],
)
def test_broker_that_is_too_old(broker: Answer, words: list[str]) -> None:
    """An old broker's list of versions is enough to refuse it, naming the release that is needed."""
    with fake_server(broker) as address:
        settings: Settings = {"bootstrap.servers": address}
        failure_of(
            make_producer(settings), UnsupportedByBroker, *words, "nothing was sent", "Apache Kafka 2.5 or newer"
        )


# -- listeners and logins ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secure(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    """A broker whose TLS listener demands a client certificate."""
    with start_secure_kafka(target, tmp_path_factory.mktemp("tls"), client_auth="required") as secure:
        yield secure


@pytest.fixture(scope="module")
def topic(secure: SecureKafka) -> str:
    create_topic(secure.broker.bootstrap, "errors", partitions=1)
    return "errors"


@pytest.fixture(scope="module")
def plain(secure: SecureKafka) -> Settings:
    return {"bootstrap.servers": secure.broker.bootstrap}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_wrong_password(protocol: Protocol, mechanism: str, secure: SecureKafka) -> None:
    """The login is not tried again, and the password is not repeated."""
    settings = secure.settings(protocol) | login(mechanism) | {"sasl.password": "not-the-password"}
    for client in (make_producer, make_transactional_producer, read):
        error = failure_of(
            client(settings), AuthenticationFailed, "nothing was sent", "sasl.username and sasl.password", mechanism
        )
        assert "not-the-password" not in str(error)


@each_client
def test_unknown_authority(client: Client, secure: SecureKafka) -> None:
    """A broker whose certificate nobody here vouches for gets nothing, not even the login."""
    settings = secure.settings("SASL_SSL") | login("PLAIN") | {"ssl.ca.location": str(secure.files.stranger_ca)}
    failure_of(client(settings), AuthenticationFailed, "not trusted", "nothing was sent", "ssl.ca.location")


def test_unknown_authority_with_the_one_of_the_system(secure: SecureKafka) -> None:
    """Without a file of one's own it is the system's authorities that do not vouch for it."""
    settings = secure.settings("SSL", trust=False) | secure.certificate
    failure_of(make_producer(settings), AuthenticationFailed, "not trusted", "ssl.ca.location")


@each_client
def test_missing_client_certificate(client: Client, secure: SecureKafka) -> None:
    """What the broker demands is named, with the two settings; with them the same client gets in.

    With TLS 1.3 the handshake is over for the client before the broker looks at its certificate. A broker that closes
    at once can take its own alert back from the client's buffers, and then the client can only guess the reason.
    """
    failure_of(
        client(secure.settings("SSL")),
        AuthenticationFailed | BrokerUnreachable,
        "client certificate",
        "nothing was sent",
        "ssl.certificate.location",
        "ssl.key.location",
    )
    make_producer(secure.settings("SSL") | secure.certificate)()


@each_client
def test_plaintext_client_on_a_tls_port(client: Client, secure: SecureKafka) -> None:
    """The port is recognised by its first bytes."""
    settings: Settings = {"bootstrap.servers": secure.broker.bootstrap_for("SSL")}
    failure_of(client(settings), WireError, "speaks TLS", "nothing was sent", "security.protocol=SSL")


def test_tls_client_on_a_plaintext_port(secure: SecureKafka, plain: Settings) -> None:
    """The reverse: both ways out are named, the port and the protocol."""
    failure_of(
        make_producer(secure.settings("SSL") | plain),
        BrokerUnreachable,
        "nothing was sent",
        "the broker's TLS port",
        "security.protocol=PLAINTEXT",
    )


def test_client_without_login_on_a_sasl_port(secure: SecureKafka) -> None:
    """The broker hangs up without a word; the likely reason is named all the same."""
    settings: Settings = {"bootstrap.servers": secure.broker.bootstrap_for("SASL_PLAINTEXT")}
    failure_of(make_producer(settings), ConnectionLost, "security.protocol=SASL_PLAINTEXT")


def test_login_on_a_port_without_sasl(secure: SecureKafka, plain: Settings) -> None:
    """The reverse: the broker offers no mechanism at all."""
    settings = secure.settings("SASL_PLAINTEXT") | login("PLAIN") | plain
    failure_of(make_producer(settings), AuthenticationFailed, "does not offer PLAIN", "nothing was sent")


# -- topics and records ------------------------------------------------------------------------------------------------


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the wait for a topic that may just have been created, which one test has seen in full."""
    monkeypatch.setattr("semel.client.cluster.UNKNOWN_TOPIC_PATIENCE_MS", 200)


def test_missing_topic_on_writing(plain: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is refused with the topic's name; so is a record at the end of the block, which closes all the same."""
    producer = Producer(plain)
    connection = producer.cluster.any_connection()
    sentence = ("'missing'", "nothing was written", "Create it, or check the name")
    failure_of(lambda: producer.send_table("missing", pa.table({"value": [b"value"]})), UnknownTopic, *sentence)

    def leave_block() -> None:
        with producer:
            producer.send("missing", b"value")

    hurry(monkeypatch)
    failure_of(leave_block, UnknownTopic, *sentence)
    assert not connection.is_open


def test_missing_topic_in_a_transaction(plain: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction is aborted, and the producer can begin the next one."""
    hurry(monkeypatch)
    with Producer(plain, transactional_id="missing-topic") as producer:

        def transaction() -> None:
            with producer.transaction():
                producer.send("missing", b"value")

        failure_of(transaction, UnknownTopic, "'missing'", "nothing was written", "Create it, or check the name")
        with producer.transaction():
            pass


def test_missing_topic_on_reading(plain: Settings) -> None:
    """The same sentence for a reader."""
    failure_of(
        read(plain, "missing"), UnknownTopic, "'missing'", "nothing was written to it or read from it", "Create it"
    )


def test_missing_partition(plain: Settings, topic: str) -> None:
    """A topic that is there without the partition is another mistake, and is told at once."""
    failure_of(read(plain, topic, 7), UnknownTopic, f"Topic {topic!r} has 1 partitions", "Add partitions")


def test_record_above_the_limit_of_the_client(plain: Settings, topic: str) -> None:
    """It is refused before anything is sent; the settings to raise are named, and raising them helps."""
    too_large = bytes(1_100_000)
    failure_of(
        write(plain, topic, too_large), RecordTooLarge, "it was not taken", "max.request.size", "max.message.bytes"
    )
    create_topic(str(plain["bootstrap.servers"]), "roomy", config={"max.message.bytes": "2000000"})
    write(plain | {"max.request.size": 2_000_000}, "roomy", too_large)()


def test_record_above_the_batch_size_is_no_error(plain: Settings, topic: str) -> None:
    """`batch.size` says how much to gather: a larger record goes in a batch of its own, as with Kafka's own client."""
    with Producer(plain, batch_size=16_384) as producer:
        producer.send(topic, bytes(100_000))
        producer.send(topic, b"small")
        assert sum(stored.record_count for stored in producer.flush()) == 2


def test_record_above_the_limit_of_the_topic(plain: Settings) -> None:
    """The broker refuses it; the topic's setting is named, and the producer goes on with smaller ones."""
    create_topic(str(plain["bootstrap.servers"]), "narrow", config={"max.message.bytes": "2000"})
    with Producer(plain) as producer:
        producer.send("narrow", bytes(3_000))
        error = failure_of(producer.flush, KafkaError, "narrow-0", "was not stored", "max.message.bytes", "batch.size")
        assert isinstance(error, KafkaError)
        assert error.code is ErrorCode.message_too_large
        producer.send("narrow", b"small")
        [stored] = producer.flush()
        assert stored.base_offset == 0


# -- in the middle of work ---------------------------------------------------------------------------------------------


class Revocable:
    """Lets a producer's login fail from now on, as when its password is changed, and work again."""

    def __init__(self, producer: Producer) -> None:
        self._cluster = producer.cluster
        self._right = producer.cluster.config

    def revoke(self) -> None:
        wrong = replace(self._right.security, password="not-the-password")
        self._cluster.config = replace(self._right, security=wrong)
        self._cluster.close()  # an open connection stays logged in

    def restore(self) -> None:
        self._cluster.config = self._right


def test_login_that_is_revoked_while_writing(secure: SecureKafka, topic: str) -> None:
    """The records fail once, a later flush does not wait for them, and with a login again the producer goes on."""
    with Producer(secure.settings("SASL_PLAINTEXT") | login("SCRAM-SHA-256")) as producer:
        password = Revocable(producer)
        producer.send(topic, b"before")
        producer.flush()
        password.revoke()
        producer.send(topic, b"meanwhile")
        failure_of(producer.flush, AuthenticationFailed, "sasl.username and sasl.password")
        assert producer.flush() == []
        password.restore()
        producer.send(topic, b"after")
        [stored] = producer.flush()
        assert stored.record_count == 1


def test_login_that_is_revoked_before_the_commit(secure: SecureKafka, topic: str) -> None:
    """A commit that could not be asked for is never reported as anything but unknown, and can be resolved later."""
    settings = secure.settings("SASL_PLAINTEXT") | login("PLAIN")
    with Producer(settings, transactional_id="revoked") as producer:
        password = Revocable(producer)
        producer.begin()
        producer.send(topic, b"value")
        producer.flush()
        password.revoke()
        with pytest.raises(CommitUnknown, match=r"resolve\(\)") as caught:
            producer.commit()
        check_pickles(caught.value)
        password.restore()
        assert producer.resolve() is Outcome.ABORTED
        with producer.transaction():
            producer.send(topic, b"again")
