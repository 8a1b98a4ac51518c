"""The topic store: Kafka's rules, changes that survive a crash, and changes that fail as a whole."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kio.schema.errors import ErrorCode
from memory_meta import MemoryMeta

from semel.broker.configs import BrokerSettings
from semel.broker.pacing import Slices, finish_now
from semel.broker.topic_names import colliding
from semel.broker.topics import META_NAME, OFFSETS_TOPIC, TRANSACTION_TOPIC, Topic, TopicStore, decide_configs
from semel.core.refusal import Refused
from semel.errors import ConfigError

SETTINGS = BrokerSettings({"num.partitions": 3})


class Told:
    """A listener that writes down what it is told, and can fail like a full disk."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.is_full = False

    def _note(self, *call: object) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.calls.append(call)

    def on_created(self, topic: Topic) -> Slices[None]:
        yield
        self._note("created", topic.name, topic.partition_count)

    def on_deleted(self, topic: Topic) -> Slices[None]:
        yield
        self._note("deleted", topic.name)

    def on_grown(self, topic: Topic, first_new: int) -> Slices[None]:
        yield
        self._note("grown", topic.name, first_new, topic.partition_count)

    def on_config(self, topic: Topic) -> None:
        self._note("config", topic.name, dict(topic.configs))


def ids(seed: int = 1) -> Callable[[], UUID]:
    source = random.Random(seed)
    return lambda: UUID(int=source.getrandbits(128), version=4)


def open_store(meta: MemoryMeta, told: Told | None = None, seed: int = 1) -> TopicStore:
    return TopicStore(meta, told or Told(), new_id=ids(seed))


@pytest.fixture
def meta() -> MemoryMeta:
    return MemoryMeta()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def store(meta: MemoryMeta, told: Told) -> TopicStore:
    return open_store(meta, told)


def create(store: TopicStore, name: str, partition_count: int = 1, **configs: str) -> Topic:
    texts = {key.replace("_", "."): text for key, text in configs.items()}
    return store.create(store.decide_create(name, SETTINGS, partition_count=partition_count, configs=texts))


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "Topic name is invalid: the empty string is not allowed"),
        (".", "Topic name is invalid: '.' is not allowed"),
        ("..", "Topic name is invalid: '..' is not allowed"),
        ("x" * 250, "is longer than the max allowed length 249"),
        ("sp ace", "contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'"),
        ("a/../b", "contains one or more characters"),
        ("ä", "contains one or more characters"),
        ("a\n", "contains one or more characters"),
        (OFFSETS_TOPIC, "the broker creates it itself"),
    ],
)
def test_a_bad_name_is_refused(store: TopicStore, name: str, reason: str) -> None:
    """The name becomes a folder: nothing but Kafka's letters gets in."""
    with pytest.raises(Refused) as caught:
        store.decide_create(name, SETTINGS)
    assert caught.value.code is ErrorCode.invalid_topic_exception
    assert reason in caught.value.reason


def test_names_that_differ_only_in_dot_and_underscore_collide(store: TopicStore) -> None:
    """They would be one name in metrics; the words are Kafka's."""
    create(store, "a.b")
    with pytest.raises(Refused) as caught:
        store.decide_create("a_b", SETTINGS)
    assert caught.value.code is ErrorCode.invalid_topic_exception
    assert caught.value.reason == "Topic 'a_b' collides with existing topic: a.b"
    assert store.decide_create("ab", SETTINGS).name == "ab"


@given(st.text("ab._", min_size=1, max_size=5), st.text("ab._", min_size=1, max_size=5))
def test_collision_is_symmetric(one: str, other: str) -> None:
    """Who comes first makes no difference."""
    assert (colliding(one, [other]) is None) == (colliding(other, [one]) is None)


def test_a_topic_that_is_there_is_not_created_again(store: TopicStore) -> None:
    """TOPIC_ALREADY_EXISTS."""
    create(store, "orders")
    with pytest.raises(Refused, match="Topic 'orders' already exists") as caught:
        store.decide_create("orders", SETTINGS)
    assert caught.value.code is ErrorCode.topic_already_exists


# -- numbers, assignments, configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"partition_count": 0}, ErrorCode.invalid_partitions),
        ({"partition_count": -2}, ErrorCode.invalid_partitions),
        ({"replication_factor": 0}, ErrorCode.invalid_replication_factor),
        ({"replication_factor": 3}, ErrorCode.invalid_replication_factor),
        ({"assignments": {0: [1]}, "replication_factor": 1}, ErrorCode.invalid_request),
        ({"assignments": {0: [1]}, "partition_count": 1}, ErrorCode.invalid_request),
        ({"assignments": {1: [1]}}, ErrorCode.invalid_replica_assignment),
        ({"assignments": {0: [7]}}, ErrorCode.invalid_replica_assignment),
        ({"assignments": {0: []}}, ErrorCode.invalid_replica_assignment),
        ({"assignments": {0: [1, 1]}}, ErrorCode.invalid_replica_assignment),
        ({"configs": {"retention.ms": None}}, ErrorCode.invalid_config),
        ({"configs": {"retention.ms": "x"}}, ErrorCode.invalid_config),
        ({"configs": {"min.compaction.lag.ms": "5", "max.compaction.lag.ms": "1"}}, ErrorCode.invalid_config),
        ({"configs": {"remote.storage.enable": "true"}}, ErrorCode.invalid_config),
    ],
)
def test_a_shape_that_cannot_be_is_refused(store: TopicStore, arguments: dict[str, object], code: ErrorCode) -> None:
    """Each mistake with Kafka's own code, and deciding changes nothing."""
    with pytest.raises(Refused) as caught:
        store.decide_create("orders", SETTINGS, **arguments)  # pyright: ignore[reportArgumentType]
    assert caught.value.code is code
    assert len(store) == 0


def test_shapes_that_can_be(store: TopicStore) -> None:
    """-1 is the broker's default, 1 copy is what there is, and a manual assignment names this broker."""
    assert store.decide_create("a", SETTINGS).partition_count == 3
    assert store.decide_create("a", SETTINGS, partition_count=5, replication_factor=1).partition_count == 5
    assert store.decide_create("a", SETTINGS, assignments={1: [1], 0: [1]}).partition_count == 2
    assert decide_configs({"retention.ms": " 5 "}, SETTINGS) == {"retention.ms": "5"}


# -- changes -----------------------------------------------------------------------------------------------------------


def test_changes_are_on_disk_before_the_listener_hears_of_them(meta: MemoryMeta) -> None:
    """A crash in the listener cannot lose what was decided."""
    seen: list[list[str]] = []

    class Spy(Told):
        def _note(self, *call: object) -> None:
            seen.append([topic["name"] for topic in json.loads(meta.files[META_NAME])["topics"]])

    store = open_store(meta, Spy())
    create(store, "a")
    create(store, "b")
    store.delete("a")
    assert seen == [["a"], ["a", "b"], ["b"]]


def test_topics_survive_a_restart(meta: MemoryMeta, store: TopicStore, told: Told) -> None:
    """Names, ids, counts, configs, the cluster's id and altered broker configs; the listener is told once of each."""
    create(store, "a", 2, retention_ms="5")
    create(store, "b")
    store.grow(store.decide_grow("a", 4, SETTINGS))
    store.alter_config("a", {"flush.ms": "7"})
    store.delete("b")
    store.ensure_internal(OFFSETS_TOPIC, SETTINGS)
    store.alter_broker_config("", {"message.max.bytes": "9"})

    again = open_store(meta, Told(), seed=2)

    assert list(again) == list(store)
    assert again.cluster_id == store.cluster_id
    assert again.broker_configs == {"": {"message.max.bytes": "9"}}
    topic = again.get("a")
    assert topic is not None
    assert (topic.partition_count, topic.configs, topic.is_internal) == (4, {"flush.ms": "7"}, False)
    assert again.by_id(topic.topic_id) == topic
    assert told.calls == [
        ("created", "a", 2),
        ("created", "b", 1),
        ("grown", "a", 2, 4),
        ("config", "a", {"flush.ms": "7"}),
        ("deleted", "b"),
        ("created", OFFSETS_TOPIC, 4),
    ]


def test_a_topic_created_again_has_another_id(store: TopicStore) -> None:
    """Whoever holds the old id does not reach the new topic."""
    first = create(store, "a")
    store.delete("a")
    second = create(store, "a")
    assert first.topic_id != second.topic_id
    assert store.by_id(first.topic_id) is None


def test_the_cluster_id_has_kafkas_form(store: TopicStore) -> None:
    """22 letters of URL-safe base64, and never one that looks like an option."""
    assert len(store.cluster_id) == 22
    dashes = iter([UUID(int=0xF8 << 120), UUID(int=0x10 << 120)])
    assert not TopicStore(MemoryMeta(), Told(), new_id=lambda: next(dashes)).cluster_id.startswith("-")


def test_internal_topics_have_their_own_shape(store: TopicStore) -> None:
    """Compacted, with their own partition counts, and made only once."""
    offsets = store.ensure_internal(OFFSETS_TOPIC, SETTINGS)
    transactions = store.ensure_internal(TRANSACTION_TOPIC, SETTINGS)
    assert offsets.is_internal
    assert offsets.configs["cleanup.policy"] == transactions.configs["cleanup.policy"] == "compact"
    assert (offsets.partition_count, transactions.partition_count) == (4, 4)
    assert store.ensure_internal(OFFSETS_TOPIC, SETTINGS) is offsets
    for topic in (offsets, transactions):
        assert decide_configs(topic.configs, SETTINGS) == topic.configs


@pytest.mark.parametrize(
    ("count", "assignments", "code"),
    [
        (3, None, ErrorCode.invalid_partitions),
        (2, None, ErrorCode.invalid_partitions),
        (5, [[1]], ErrorCode.invalid_replica_assignment),
        (4, [[9]], ErrorCode.invalid_replica_assignment),
    ],
)
def test_growth_that_cannot_be_is_refused(
    store: TopicStore, count: int, assignments: list[list[int]] | None, code: ErrorCode
) -> None:
    """Fewer, as many, or with assignments that do not fit."""
    create(store, "a", 3)
    with pytest.raises(Refused) as caught:
        store.decide_grow("a", count, SETTINGS, assignments)
    assert caught.value.code is code


def test_an_internal_topic_does_not_grow(store: TopicStore) -> None:
    """Its groups would be looked for in other partitions than they are in."""
    store.ensure_internal(OFFSETS_TOPIC, SETTINGS)
    with pytest.raises(Refused) as caught:
        store.decide_grow(OFFSETS_TOPIC, 9, SETTINGS)
    assert caught.value.code is ErrorCode.policy_violation


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_change_that_cannot_be_written_is_not_made(meta: MemoryMeta, store: TopicStore, told: Told) -> None:
    """Neither in memory nor for the listener."""
    create(store, "a")
    before = list(store)
    meta.writes_until_full = 0
    grown = store.decide_grow("a", 4, SETTINGS)
    for change in (
        lambda: create(store, "b"),
        lambda: store.grow(grown),
        lambda: store.alter_config("a", {"flush.ms": "1"}),
        lambda: store.delete("a"),
        lambda: store.alter_broker_config("", {"message.max.bytes": "9"}),
    ):
        with pytest.raises(Refused) as caught:
            change()
        assert caught.value.code is ErrorCode.kafka_storage_error
    assert list(store) == before
    assert store.broker_configs == {}
    assert told.calls == [("created", "a", 1)]


@pytest.mark.parametrize("writes_left", [1, 2])
def test_partitions_that_cannot_be_opened_undo_the_change(
    meta: MemoryMeta, store: TopicStore, told: Told, writes_left: int
) -> None:
    """The topic is as before in memory, and on disk as well unless the disk refuses that too."""
    create(store, "a")
    before = list(store)
    told.is_full = True
    meta.writes_until_full = writes_left
    with pytest.raises(Refused) as caught:
        create(store, "b")
    assert caught.value.code is ErrorCode.kafka_storage_error
    assert list(store) == before
    meta.writes_until_full = writes_left
    with pytest.raises(Refused):
        store.grow(store.decide_grow("a", 4, SETTINGS))
    assert list(store) == before
    if writes_left == 2:
        assert list(open_store(meta)) == before


def test_a_deletion_counts_though_its_files_stay(
    store: TopicStore, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the topic is gone from the list it is deleted; what is left on disk is told in the log."""
    create(store, "a")
    told.is_full = True
    store.delete("a")
    assert len(store) == 0
    assert "topic a is deleted, but not all of its files" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not json", "cannot be read"),
        (b"[]", "version None"),
        (b'{"version": 2}', "version 2, and this Semel reads version 1"),
        (b'{"version": 1, "cluster_id": "c", "broker_configs": {}, "topics": [{"name": "a"}]}', "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_stops_the_start(meta: MemoryMeta, content: bytes, words: str) -> None:
    """Starting without topics would look like losing them."""
    meta.files[META_NAME] = content
    with pytest.raises(ConfigError, match=words):
        open_store(meta)
    assert meta.files[META_NAME] == content


class Restarts(RuleBasedStateMachine):
    """Any sequence of changes, with failing disks and restarts in between, against a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.meta = MemoryMeta()
        self.seed = 0
        self.expected: dict[str, int] = {}
        self.store = open_store(self.meta)

    @rule(name=st.sampled_from("abc"), count=st.integers(1, 3), is_full=st.booleans())
    def create_topic(self, name: str, count: int, is_full: bool) -> None:
        self.meta.writes_until_full = 0 if is_full else None
        if is_full or name in self.expected:
            with pytest.raises(Refused):
                create(self.store, name, count)
        else:
            create(self.store, name, count)
            self.expected[name] = count
        self.meta.writes_until_full = None

    @rule(name=st.sampled_from("abc"), is_full=st.booleans())
    def delete_topic(self, name: str, is_full: bool) -> None:
        if name in self.store:
            self.meta.writes_until_full = 0 if is_full else None
            if is_full:
                with pytest.raises(Refused):
                    self.store.delete(name)
            else:
                self.store.delete(name)
                del self.expected[name]
            self.meta.writes_until_full = None

    @rule()
    def restart(self) -> None:
        self.seed += 1
        self.store = open_store(self.meta, seed=self.seed)

    @invariant()
    def topics_are_what_was_answered(self) -> None:
        assert {topic.name: topic.partition_count for topic in self.store} == self.expected
        assert all(self.store.by_id(topic.topic_id) == topic for topic in self.store)


TestRestarts = Restarts.TestCase
TestRestarts.settings = hypothesis_settings(max_examples=30, stateful_step_count=25)


def test_no_more_partitions_are_created_than_the_settings_allow() -> None:
    """By new topics and by topics that grow; what is deleted makes room, and internal topics are always created."""
    settings = BrokerSettings({"num.partitions": 1, "semel.partitions.max": 10})
    store = open_store(MemoryMeta())
    store.create(store.decide_create("first", settings, partition_count=8))
    with pytest.raises(Refused, match=r"semel\.partitions\.max") as refused:
        store.decide_create("second", settings, partition_count=3)
    assert refused.value.code is ErrorCode.policy_violation
    store.create(store.decide_create("second", settings, partition_count=2))
    for refused_call in (lambda: store.decide_grow("first", 9, settings), lambda: store.decide_create("x", settings)):
        with pytest.raises(Refused) as refused:
            refused_call()
        assert refused.value.code is ErrorCode.policy_violation
    store.ensure_internal(OFFSETS_TOPIC, settings)
    store.delete("second")
    store.grow(store.decide_grow("first", 10, settings))


def test_a_small_memory_has_room_for_fewer_partitions() -> None:
    """A partition takes about 5 kB: they are part of the one budget for all that clients can make the broker hold."""
    settings = BrokerSettings({"semel.client.memory.max.bytes": 64 << 20})
    store = open_store(MemoryMeta())
    store.decide_create("few", settings, partition_count=800)
    with pytest.raises(Refused, match=r"semel\.client\.memory\.max\.bytes"):
        store.decide_create("many", settings, partition_count=1_000)


def test_two_changes_of_one_topic_wait_for_each_other() -> None:
    """A topic that is deleted while its partitions are still being opened would leave some of them behind."""
    told = Told()
    store = open_store(MemoryMeta(), told)
    creating = store.create_in_slices(store.decide_create("t", SETTINGS))
    next(creating)
    deleting = store.delete_in_slices("t")
    for _ in range(3):
        next(deleting)
    assert not told.calls
    assert finish_now(creating).name == "t"
    finish_now(deleting)
    assert [call[0] for call in told.calls] == ["created", "deleted"]
    assert "t" not in store


def test_a_topic_that_two_requests_create_is_created_once() -> None:
    """The second finds out when its turn has come, although both were found to be possible."""
    store = open_store(MemoryMeta())
    first = store.create_in_slices(store.decide_create("t", SETTINGS))
    second = store.create_in_slices(store.decide_create("t", SETTINGS))
    next(first)
    next(second)
    finish_now(first)
    with pytest.raises(Refused) as refused:
        finish_now(second)
    assert refused.value.code is ErrorCode.topic_already_exists
