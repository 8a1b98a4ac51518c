"""Faults on purpose strike the requests they are meant for, and do to them what they say."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from request_samples import codes_in, names_in, sample_request

from semel.broker.faults import Cut, Delay, Drop, Error, Faults
from semel.errors import ConfigError, ConnectionLost, RequestTimedOut
from semel.testing.embedded import EmbeddedBroker
from semel.testing.exchange import exchange
from semel.testing.manual_clock import ManualClock
from semel.wire.api import Api
from semel.wire.messages import build, response_type_for
from semel.wire.server import SERVER_VERSIONS

EVERY_VERSION = [
    (api, version) for api, served in SERVER_VERSIONS.items() for version in range(served.lowest, served.highest + 1)
]
# Their answers hold one code for each thing asked, and nothing else would tell the client which it is about.
NAMES_TOPICS = [
    Api.PRODUCE,
    Api.FETCH,
    Api.LIST_OFFSETS,
    Api.METADATA,
    Api.OFFSET_COMMIT,
    Api.OFFSET_FETCH,
    Api.CREATE_TOPICS,
    Api.ADD_PARTITIONS_TO_TXN,
    Api.TXN_OFFSET_COMMIT,
]


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(fsync="never") as broker:
        yield broker


@pytest.fixture
def broker(shared_broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    yield shared_broker
    shared_broker.faults.clear()


def ask(broker: EmbeddedBroker, request: Any, *, timeout_s: float = 10.0) -> Any:
    return exchange(("127.0.0.1", broker.ports[0]), request, response_type_for(request), timeout_s=timeout_s)


def create(name: str) -> Any:
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": (), "configs": ()}
    return build(Api.CREATE_TOPICS, 5, topics=[topic], timeout=1000, validate_only=False)


def exists(broker: EmbeddedBroker, name: str) -> bool:
    return broker.call(lambda: name in broker.broker.topics)


@pytest.mark.parametrize(("api", "version"), EVERY_VERSION, ids=lambda value: getattr(value, "name", str(value)))
def test_an_error_can_be_the_answer_to_any_request(broker: EmbeddedBroker, api: Api, version: int) -> None:
    """Every API in every served version: the answer can be read, and each code in it is the injected one."""
    injection = broker.faults.inject(api, Error(ErrorCode.coordinator_not_available))
    request = sample_request(api, version)
    response = ask(broker, request)
    assert injection.served == 1
    codes = set(codes_in(response))
    assert ErrorCode.coordinator_not_available in codes
    # The code of the whole Fetch is about its session, which nothing is wrong with.
    assert codes - {ErrorCode.coordinator_not_available} <= ({ErrorCode.none} if api is Api.FETCH else set())
    if api in NAMES_TOPICS:
        assert {"name-0", "name-1"} <= names_in(response)


def test_an_error_leaves_the_request_undone_unless_told(broker: EmbeddedBroker) -> None:
    """A refusal changes nothing; an error that is a lie, such as a time-out after the fact, does."""
    broker.faults.inject(Api.CREATE_TOPICS, Error(ErrorCode.not_controller))
    assert set(codes_in(ask(broker, create("refused")))) == {ErrorCode.not_controller}
    assert not exists(broker, "refused")
    broker.faults.inject(Api.CREATE_TOPICS, Error(ErrorCode.request_timed_out, carried_out=True))
    assert set(codes_in(ask(broker, create("lied-about")))) == {ErrorCode.request_timed_out}
    assert exists(broker, "lied-about")


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_cut_closes_the_connection_in_place_of_the_answer(broker: EmbeddedBroker, carried_out: bool) -> None:
    """The client cannot tell whether its request was carried out; the test can."""
    broker.faults.inject(Api.CREATE_TOPICS, Cut(carried_out=carried_out))
    with pytest.raises(ConnectionLost):
        ask(broker, create(f"cut-{carried_out}"))
    assert exists(broker, f"cut-{carried_out}") is carried_out


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_drop_leaves_the_client_waiting(broker: EmbeddedBroker, carried_out: bool) -> None:
    """The connection stays open and silent, and another one is served meanwhile."""
    name = f"dropped-{carried_out}"
    broker.faults.inject(Api.CREATE_TOPICS, Drop(carried_out=carried_out))
    with pytest.raises(RequestTimedOut):
        ask(broker, create(name), timeout_s=0.5)
    assert exists(broker, name) is carried_out
    assert set(codes_in(ask(broker, create("after-" + name)))) == {ErrorCode.none}


def test_a_dropped_connection_does_not_hold_up_the_end_of_the_broker() -> None:
    """Whoever waits for nothing is let go when the broker stops."""
    with EmbeddedBroker(fsync="never") as broker:
        drop = broker.faults.inject(Api.METADATA, Drop(carried_out=False))
        with pytest.raises(RequestTimedOut):
            ask(broker, sample_request(Api.METADATA, 9), timeout_s=0.2)
        with socket.create_connection(("127.0.0.1", broker.ports[0])):
            started = time.monotonic()
            broker.stop()
    assert drop.served == 1
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_delay_lasts_as_long_as_the_clock_says(carried_out: bool) -> None:
    """Nothing is answered before the time has come, and by the manual clock it comes when the test says."""
    with EmbeddedBroker(clock=ManualClock(), fsync="never") as broker:
        broker.faults.inject(Api.CREATE_TOPICS, Delay(ms=30_000, carried_out=carried_out))
        with socket.create_connection(("127.0.0.1", broker.ports[0]), timeout=10) as client:
            client.settimeout(0.3)
            client.sendall(frame(create("late")))
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert exists(broker, "late") is carried_out
            broker.clock.advance(ms=30_000)
            client.settimeout(10)
            assert client.recv(1)
        assert exists(broker, "late")


def frame(request: Any) -> bytes:
    from semel.wire.messages import encode_request

    return b"".join(encode_request(request, 1, "test"))


def test_faults_are_counted_skipped_and_chosen_by_content(broker: EmbeddedBroker) -> None:
    """The second and third request for one topic are struck, and no other request is."""
    refused = ErrorCode.policy_violation
    injection = broker.faults.inject(
        Api.CREATE_TOPICS,
        Error(refused),
        times=2,
        skip=1,
        when=lambda request: request.topics[0].name.startswith("chosen"),
    )
    names = ["chosen-1", "other-1", "chosen-2", "other-2", "chosen-3", "chosen-4"]
    codes = {name: next(codes_in(ask(broker, create(name)))) for name in names}
    assert [name for name, code in codes.items() if code is refused] == ["chosen-2", "chosen-3"]
    assert injection.served == 2


def test_a_produce_request_can_be_chosen_by_its_topic(broker: EmbeddedBroker) -> None:
    """Its records are not decoded for that, but its topics are there to look at."""
    broker.faults.inject(
        Api.PRODUCE,
        Error(ErrorCode.not_leader_or_follower),
        when=lambda request: request.topics[0].name == "name-0",
    )
    response = ask(broker, sample_request(Api.PRODUCE, 9))
    assert set(codes_in(response)) == {ErrorCode.not_leader_or_follower}


def test_an_error_without_acks_closes_the_connection(broker: EmbeddedBroker) -> None:
    """acks=0 has no answer; Kafka lets the producer know by ending the connection."""
    broker.faults.inject(Api.PRODUCE, Error(ErrorCode.message_too_large))
    request = build(Api.PRODUCE, 9, transactional_id=None, acks=0, timeout=1000, topic_data=())
    with pytest.raises(ConnectionLost):
        ask(broker, request)


def test_of_two_faults_the_first_strikes_first_and_clear_ends_both(broker: EmbeddedBroker) -> None:
    """Injections queue up; what was cleared strikes nobody."""
    broker.faults.inject(Api.CREATE_TOPICS, Error(ErrorCode.not_controller))
    broker.faults.inject(Api.CREATE_TOPICS, Error(ErrorCode.policy_violation), times=5)
    codes = [next(codes_in(ask(broker, create("queued")))) for _ in range(2)]
    assert codes == [ErrorCode.not_controller, ErrorCode.policy_violation]
    broker.faults.clear()
    assert set(codes_in(ask(broker, create("queued")))) == {ErrorCode.none}


@pytest.mark.parametrize(("times", "skip"), [(0, 0), (1, -1)])
def test_a_fault_that_could_never_strike_is_refused(times: int, skip: int) -> None:
    """A test that believes to test something must not pass for nothing."""
    with pytest.raises(ConfigError):
        Faults().inject(Api.METADATA, Cut(carried_out=True), times=times, skip=skip)
