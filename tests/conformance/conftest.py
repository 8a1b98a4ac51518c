"""Runs every test here on each target: the same behaviour is asked of every broker.

The targets are listed in `targets.py`; `SEMEL_TARGETS=apache-4,apache-2.5` in the environment chooses some of them.
They are run one after the other, so that no two targets' brokers run at the same time.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from java_peer import JavaPeer
from member_processes import Client
from raw import RawClient, connect
from targets import KafkaUnderTest, NewTopic, Target, chosen_targets

from semel.testing.apache_kafka import ApacheKafka
from semel.testing.exchange import create_topic
from semel.testing.security import Security

_REASONS: set[str] = set()
"""Why clients were left out of this run, told after the collection."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(flag, ..., when=param): left out on targets without these flags.")


def pytest_report_collectionfinish() -> list[str]:
    return [f"left out: {reason}" for reason in sorted(_REASONS)]


collect_ignore_glob = ["copiers/*"]  # programs that the tests run, not tests


@pytest.hookimpl(tryfirst=True)  # before the marker expression of the command line is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.conformance)
    left_out = [item for item in items if _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)  # only parametrised tests have one
    params: Mapping[str, object] = callspec.params if callspec else {}
    target, client = params.get("target"), params.get("client")
    if isinstance(client, Client) and (reason := client.left_out_on(target if isinstance(target, Target) else None)):
        _REASONS.add(reason)
        return True
    if not isinstance(target, Target):
        return False
    if _lacks_what_is_needed(item, target, params):
        return True
    # The embedded broker does not replicate: what is about several brokers has no meaning there.
    needs_cluster = "kafka_cluster" in getattr(item, "fixturenames", ())
    return item.path.name in target.leaves_out or (needs_cluster and target.start_cluster is None)


def _lacks_what_is_needed(item: pytest.Item, target: Target, params: Mapping[str, object]) -> bool:
    marks = (mark for mark in item.iter_markers("needs") if mark.kwargs.get("when") in (None, *params.values()))
    protocol = params.get("protocol")  # of transactions; of security it is a text
    is_too_new = isinstance(protocol, int) and protocol > target.transaction_protocol
    return is_too_new or any(not getattr(target, flag) for mark in marks for flag in mark.args)


@pytest.fixture(scope="session", params=chosen_targets(), ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> Target:
    """The kind of broker under test. pytest runs all tests of one target before it goes to the next."""
    return request.param


@pytest.fixture(scope="session")
def kafka(target: Target) -> Iterator[KafkaUnderTest]:
    """One running node, shared by all tests: use names of your own for topics, groups and transactional ids."""
    with target.start(Security()) as kafka:
        yield kafka


@pytest.fixture
def kafka_without_sync(request: pytest.FixtureRequest, target: Target) -> Iterator[KafkaUnderTest]:
    """For ten thousands of requests, each of which would wait for the disk."""
    if target.start_without_sync is None:
        yield request.getfixturevalue("kafka")
        return
    with target.start_without_sync() as kafka:
        yield kafka


@pytest.fixture
def raw(kafka: KafkaUnderTest) -> Iterator[RawClient]:
    """A connection to `kafka` for single requests in chosen versions."""
    with connect(kafka.bootstrap) as raw:
        yield raw


@pytest.fixture(scope="session")
def kafka_cluster(target: Target) -> Iterator[ApacheKafka]:
    """Three running nodes, shared. A test that ends a node must start it again."""
    assert target.start_cluster is not None
    with target.start_cluster() as kafka:
        yield kafka


@pytest.fixture(scope="session")
def java_peer() -> Iterator[JavaPeer]:
    """The Java client, for what must be read or written by another implementation."""
    with JavaPeer() as peer:
        yield peer


@pytest.fixture
def new_topic(request: pytest.FixtureRequest, target: Target) -> NewTopic:
    """Creates a topic with a name of its own and returns the name.

    It is created on the broker that the test asks for: the cluster if the test uses `kafka_cluster`, else the single
    node; `on` says which one in a test that uses both.
    """
    default = "kafka_cluster" if "kafka_cluster" in request.fixturenames else "kafka"

    def create(
        partitions: int = 1,
        replication: int = 1,
        config: Mapping[str, str] | None = None,
        *,
        on: KafkaUnderTest | None = None,
    ) -> str:
        broker: KafkaUnderTest = on or request.getfixturevalue(default)
        name = f"topic-{uuid.uuid4().hex[:12]}"
        create_topic(broker.bootstrap, name, partitions=partitions, replication=replication, config=config)
        return name

    return create
