"""What the fault proxy does to single requests and answers, seen from both ends: by the client and in the log."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from raw_connection import Closed, RawConnection

from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.testing.proxy import Cut, Direction
from semel.verify.chaos_reading import all_partitions, read_by_requests
from semel.verify.faults.proxy import FaultProxy, Hold, HoldUntil, Match, Outlive, Repeat, Silence
from semel.wire import Api

NUMBERS = itertools.count()
LONG_MS = 60_000


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(fsync="never") as made:
        yield made


@pytest.fixture
def proxy(broker: Broker) -> Iterator[FaultProxy]:
    with FaultProxy(broker.bootstrap) as made:
        yield made


@pytest.fixture
def name() -> str:
    return f"topic-{next(NUMBERS)}"


@pytest.fixture
def topic(broker: Broker, name: str) -> str:
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics(name, partitions=1)
    return name


def is_there(broker: Broker, topic: str) -> bool:
    return (topic, 0) in all_partitions(broker.bootstrap)


def values(broker: Broker, topic: str) -> list[str]:
    return [value for _, value in read_by_requests(broker.bootstrap, [(topic, 0)])[topic, 0]]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("direction", "cut", "is_carried_out", "is_answered"),
    [
        (Direction.REQUEST, Cut.BEFORE, False, False),
        (Direction.REQUEST, Cut.AFTER, True, False),
        (Direction.RESPONSE, Cut.BEFORE, True, False),
        (Direction.RESPONSE, Cut.AFTER, True, True),
    ],
)
def test_a_cut_strikes_on_the_side_of_the_frame_that_was_asked_for(
    broker: Broker,
    proxy: FaultProxy,
    name: str,
    direction: Direction,
    cut: Cut,
    is_carried_out: bool,
    is_answered: bool,
) -> None:
    """Whether the broker got the request and whether the client got the answer is exact, and the connection ends."""
    trap = proxy.set_trap(Match(Api.CREATE_TOPICS, direction), cut)
    with RawConnection(proxy.bootstrap) as client:
        client.send_create(name)
        if is_answered:
            assert client.receive().topics[0].name == name
        with pytest.raises(Closed):
            client.receive()
    assert trap.wait_over(10)
    if is_carried_out:
        wait_until(lambda: is_there(broker, name))
    else:
        assert not is_there(broker, name)


def test_a_held_request_waits_and_other_connections_do_not(broker: Broker, proxy: FaultProxy, name: str) -> None:
    """The broker has nothing of it until it is released, and then its client gets the answer."""
    trap = proxy.set_trap(Match(Api.CREATE_TOPICS), Hold(LONG_MS))
    with RawConnection(proxy.bootstrap) as held, RawConnection(proxy.bootstrap) as other:
        held.send_create(name)
        assert trap.wait_struck(10)
        other.send_create(f"{name}-other")
        assert other.receive().topics[0].name == f"{name}-other"
        assert not is_there(broker, name)
        with pytest.raises(TimeoutError):
            held.receive(timeout_s=0.1)
        trap.release()
        assert held.receive().topics[0].name == name
    assert is_there(broker, name)


def test_a_held_answer_leaves_the_client_in_doubt_about_what_is_done(
    broker: Broker, proxy: FaultProxy, name: str
) -> None:
    """The request has taken effect, and what the client sends behind it waits for its answer too."""
    trap = proxy.set_trap(Match(Api.CREATE_TOPICS, Direction.RESPONSE), Hold(LONG_MS))
    with RawConnection(proxy.bootstrap) as client:
        client.send_create(name)
        assert trap.wait_struck(10)
        assert is_there(broker, name)
        client.send_create(f"{name}-next")
        wait_until(lambda: is_there(broker, f"{name}-next"))
        with pytest.raises(TimeoutError):
            client.receive(timeout_s=0.1)
        trap.release()
        assert client.receive().topics[0].name == name
        assert client.receive().topics[0].name == f"{name}-next"


def test_a_request_that_outlives_its_connection_comes_before_the_clients_next_answer(
    broker: Broker, proxy: FaultProxy, name: str
) -> None:
    """The client loses its connection at once; other clients go on; the last step waits until the broker has it."""
    steps = (Match(Api.CREATE_TOPICS, Direction.RESPONSE), Match(Api.API_VERSIONS, Direction.RESPONSE))
    trap = proxy.set_trap(Match(Api.CREATE_TOPICS, client_id="mine"), Outlive(steps, LONG_MS))
    with RawConnection(proxy.bootstrap, "mine") as client:
        client.send_create(f"{name}-late")
        with pytest.raises(Closed):
            client.receive()
    with RawConnection(proxy.bootstrap, "mine") as client, RawConnection(proxy.bootstrap, "other") as other:
        other.send_create(f"{name}-other")
        other.receive()
        client.send_create(name)
        client.receive()
        other.call(Api.API_VERSIONS, 3, client_software_name="raw", client_software_version="1")
        assert trap.ended_ns is None, "another client's answers are no step of it"
        assert not is_there(broker, f"{name}-late")
        client.call(Api.API_VERSIONS, 3, client_software_name="raw", client_software_version="1")
        assert trap.ended_ns is not None
    assert is_there(broker, f"{name}-late")


def test_a_request_that_outlives_its_connection_arrives_though_its_client_never_comes_back(
    broker: Broker, proxy: FaultProxy, name: str
) -> None:
    """After its time; a client that has died for good must not hold it for ever."""
    trap = proxy.set_trap(Match(Api.CREATE_TOPICS), Outlive((Match(Api.FETCH),), 50))
    with RawConnection(proxy.bootstrap) as client:
        client.send_create(name)
        with pytest.raises(Closed):
            client.receive()
    assert trap.wait_over(10)
    assert is_there(broker, name)


def test_a_delay_ends_by_itself(proxy: FaultProxy, name: str) -> None:
    """The client is answered late, by as much as was asked for."""
    trap = proxy.set_trap(Match(Api.CREATE_TOPICS), Hold(150))
    with RawConnection(proxy.bootstrap) as client:
        started = time.monotonic()
        client.send_create(name)
        client.receive()
        assert time.monotonic() - started >= 0.15
    assert trap.began_ns is not None
    assert trap.ended_ns is not None
    assert trap.ended_ns - trap.began_ns >= 150_000_000


def test_a_held_request_reaches_the_broker_although_its_client_has_hung_up(
    broker: Broker, proxy: FaultProxy, name: str
) -> None:
    """As a packet that was stuck on the way: when `wait_over` is true, the broker has answered it."""
    trap = proxy.set_trap(Match(Api.CREATE_TOPICS), Hold(LONG_MS))
    with RawConnection(proxy.bootstrap) as client:
        client.send_create(name)
        assert trap.wait_struck(10)
    assert not is_there(broker, name)
    trap.release()
    assert trap.wait_over(10)
    assert is_there(broker, name)


def test_a_trap_takes_the_nth_request_of_one_client_and_no_other(proxy: FaultProxy, name: str) -> None:
    """Requests of other clients and of other kinds are neither struck nor counted."""
    trap = proxy.set_trap(Match(Api.CREATE_TOPICS, client_id="second", nth=2), Cut.BEFORE)
    with RawConnection(proxy.bootstrap, "first") as first, RawConnection(proxy.bootstrap, "second") as second:
        for number in range(3):
            first.send_create(f"{name}-{number}")
            first.receive()
            second.call(Api.API_VERSIONS, 0)
        second.send_create(f"{name}-a")
        second.receive()
        assert trap.passage is None
        second.send_create(f"{name}-b")
        with pytest.raises(Closed):
            second.receive()
        first.send_create(f"{name}-4")
        assert first.receive().topics[0].name == f"{name}-4"
    assert trap.passage is not None
    assert trap.passage.client_id == "second"
    assert trap.passage.api_key == Api.CREATE_TOPICS


def test_silence_swallows_the_answer_and_all_behind_it_on_an_open_connection(
    broker: Broker, proxy: FaultProxy, name: str
) -> None:
    """The client waits in vain while the broker works for it; a new connection is served."""
    proxy.set_trap(Match(Api.CREATE_TOPICS, Direction.RESPONSE), Silence())
    with RawConnection(proxy.bootstrap) as silent, RawConnection(proxy.bootstrap) as other:
        silent.send_create(name)
        wait_until(lambda: is_there(broker, name))
        silent.send_create(f"{name}-next")
        wait_until(lambda: is_there(broker, f"{name}-next"))
        with pytest.raises(TimeoutError):
            silent.receive(timeout_s=0.2)
        assert other.call(Api.API_VERSIONS, 0).api_keys


@pytest.mark.parametrize(("producer_id", "copies"), [(-1, 2), (4242, 1)], ids=["plain", "idempotent"])
def test_a_repeat_reaches_the_broker_a_second_time_and_its_answer_nobody(
    broker: Broker, proxy: FaultProxy, topic: str, producer_id: int, copies: int
) -> None:
    """A plain batch is in the log twice, an idempotent one once; the client gets one answer, to the first."""
    trap = proxy.set_trap(Match(Api.PRODUCE), Repeat(after_ms=LONG_MS))
    with RawConnection(proxy.bootstrap) as client:
        client.send_record(topic, "payment", producer_id=producer_id)
        assert client.receive().responses[0].partition_responses[0].base_offset == 0
        assert values(broker, topic) == ["payment"]
        trap.release()
        assert trap.wait_over(10)
        with pytest.raises(TimeoutError):
            client.receive(timeout_s=0.1)
    assert values(broker, topic) == ["payment"] * copies


def test_a_request_is_overtaken_by_one_of_another_connection(broker: Broker, proxy: FaultProxy, topic: str) -> None:
    """Sent first, stored second."""
    answer = Match(Api.PRODUCE, Direction.RESPONSE)
    trap = proxy.set_trap(Match(Api.PRODUCE, client_id="slow"), HoldUntil(answer, LONG_MS))
    with RawConnection(proxy.bootstrap, "slow") as slow, RawConnection(proxy.bootstrap, "quick") as quick:
        slow.send_record(topic, "first")
        assert trap.wait_struck(10)
        quick.send_record(topic, "second")
        assert quick.receive().responses[0].partition_responses[0].base_offset == 0
        assert slow.receive().responses[0].partition_responses[0].base_offset == 1
    assert values(broker, topic) == ["second", "first"]


def test_a_request_that_nobody_overtakes_goes_on_alone(broker: Broker, proxy: FaultProxy, topic: str) -> None:
    """Its own connection's next request does not count, and its patience ends."""
    proxy.set_trap(Match(Api.PRODUCE), HoldUntil(Match(Api.PRODUCE), 100))
    with RawConnection(proxy.bootstrap) as client:
        client.send_record(topic, "first")
        client.send_record(topic, "second")
        client.receive()
        client.receive()
    assert values(broker, topic) == ["first", "second"]


def test_every_answer_that_names_a_broker_names_the_proxy(broker: Broker, proxy: FaultProxy) -> None:
    """A client that got the broker's own address would go past the proxy."""
    own = int(proxy.bootstrap.rpartition(":")[2])
    assert own != int(broker.bootstrap.rpartition(":")[2])
    with RawConnection(proxy.bootstrap) as client:
        metadata = client.call(
            Api.METADATA,
            9,
            topics=[],
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        cluster = client.call(Api.DESCRIBE_CLUSTER, 0, include_cluster_authorized_operations=False)
        alone = client.call(Api.FIND_COORDINATOR, 3, key="somebody", key_type=1)
        several = client.call(Api.FIND_COORDINATOR, 4, key_type=1, coordinator_keys=["somebody", "another"])
    told = [*metadata.brokers, *cluster.brokers, alone, *several.coordinators]
    assert len(told) == 5
    assert {(one.host, one.port) for one in told} == {("127.0.0.1", own)}


def test_a_trap_that_is_removed_or_released_strikes_nobody(proxy: FaultProxy, name: str) -> None:
    """After a fault's time everything passes; one that has struck cannot be removed, only released."""
    unused = proxy.set_trap(Match(Api.CREATE_TOPICS, nth=2), Cut.BEFORE)
    holding = proxy.set_trap(Match(Api.CREATE_TOPICS), Hold(LONG_MS))
    with RawConnection(proxy.bootstrap) as client:
        client.send_create(name)
        assert holding.wait_struck(10)
        assert not proxy.remove_trap(holding)
        assert proxy.remove_trap(unused)
        proxy.set_trap(Match(), Silence())
        proxy.release_all()
        assert client.receive().topics[0].name == name
        assert client.call(Api.API_VERSIONS, 0).api_keys


def test_a_proxy_that_is_closed_keeps_nothing_back(broker: Broker, name: str) -> None:
    """Closing takes no longer than what is held would, and the client sees the end of its connection."""
    with FaultProxy(broker.bootstrap) as proxy, RawConnection(proxy.bootstrap) as client:
        trap = proxy.set_trap(Match(Api.CREATE_TOPICS), Hold(LONG_MS))
        client.send_create(name)
        assert trap.wait_struck(10)
        started = time.monotonic()
        proxy.close()
        assert time.monotonic() - started < 5
        with pytest.raises(Closed):
            client.receive()


def test_an_answer_cannot_be_repeated(proxy: FaultProxy) -> None:
    """A client would take it for the answer to something else."""
    with pytest.raises(ValueError, match="only a request"):
        proxy.set_trap(Match(direction=Direction.RESPONSE), Repeat(0))


def test_semels_producer_gets_through_everything_once(broker: Broker, proxy: FaultProxy, topic: str) -> None:
    """Transactions with each kind of trap in their way: every record is there once, in order."""
    kinds = [Cut.BEFORE, Cut.AFTER, Hold(50), Repeat(20), HoldUntil(Match(), 50)]
    requests = [Match(api) for api in (Api.PRODUCE, Api.END_TXN)]
    answers = [Match(api, Direction.RESPONSE) for api in (Api.PRODUCE, Api.END_TXN)]
    scenes = [
        *itertools.product(requests, kinds),
        *itertools.product(answers, (Cut.BEFORE, Cut.AFTER, Hold(50), Silence())),
    ]
    settings = {
        "bootstrap.servers": proxy.bootstrap,
        "transactional.id": topic,
        "request.timeout.ms": 300,
        "retry.backoff.ms": 5,
        "delivery.timeout.ms": 20_000,
    }
    with Producer(settings) as producer:
        for number, (match, treatment) in enumerate(scenes):
            trap = proxy.set_trap(match, treatment)
            with producer.transaction():
                producer.send(topic, str(number).encode(), partition=0)
            assert trap.wait_over(10), (match, treatment)
    assert values(broker, topic) == [str(number) for number in range(len(scenes))]
