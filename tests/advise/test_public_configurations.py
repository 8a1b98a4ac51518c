"""The doctor on example configurations of other projects, as they were in November 2026.

Only the settings are here, without comments and without what has nothing to do with Kafka's clients. The projects are
Apache Kafka, Debezium and Confluent's examples; each test says which file, and what is wrong in it.
"""

from __future__ import annotations

from pathlib import Path

from semel.advise.examine import examine_files

MIRROR_MAKER = """\
clusters = A, B
A.bootstrap.servers = A_host1:9092, A_host2:9092, A_host3:9092
B.bootstrap.servers = B_host1:9092, B_host2:9092, B_host3:9092
A->B.enabled = true
A->B.topics = .*
B->A.enabled = true
B->A.topics = .*
replication.factor=1
checkpoints.topic.replication.factor=1
heartbeats.topic.replication.factor=1
offset-syncs.topic.replication.factor=1
offset.storage.replication.factor=1
status.storage.replication.factor=1
config.storage.replication.factor=1
"""

CONNECT_WORKER = """\
bootstrap.servers=localhost:9092
group.id=connect-cluster
key.converter=org.apache.kafka.connect.json.JsonConverter
value.converter=org.apache.kafka.connect.json.JsonConverter
offset.storage.topic=connect-offsets
offset.storage.replication.factor=1
config.storage.topic=connect-configs
config.storage.replication.factor=1
status.storage.topic=connect-status
status.storage.replication.factor=1
offset.flush.interval.ms=10000
"""

DEBEZIUM_TO_KAFKA = """\
debezium.sink.type=kafka
debezium.sink.kafka.producer.key.serializer=org.apache.kafka.common.serialization.StringSerializer
debezium.sink.kafka.producer.value.serializer=org.apache.kafka.common.serialization.StringSerializer
debezium.sink.kafka.producer.bootstrap.servers=kafka:9092
debezium.source.connector.class=io.debezium.connector.postgresql.PostgresConnector
debezium.source.offset.storage=org.apache.kafka.connect.storage.MemoryOffsetBackingStore
debezium.source.offset.flush.interval.ms=0
debezium.source.database.hostname=postgres
debezium.source.topic.prefix=tutorial
"""

DEBEZIUM_TO_JDBC = """\
debezium.sink.type=jdbc
debezium.sink.jdbc.connection.url=jdbc:mysql://mysql:3306/target_db
debezium.sink.jdbc.insert.mode=upsert
debezium.sink.jdbc.primary.key.mode=record_key
debezium.source.connector.class=io.debezium.connector.postgresql.PostgresConnector
debezium.source.offset.storage.file.filename=data/offsets.dat
debezium.source.offset.flush.interval.ms=0
debezium.source.topic.prefix=migration
"""

SPRING_BOOT = """\
spring.kafka.properties.bootstrap.servers=localhost:9092
spring.kafka.producer.key-serializer=org.apache.kafka.common.serialization.StringSerializer
spring.kafka.producer.value-serializer=io.confluent.kafka.serializers.KafkaAvroSerializer
spring.kafka.consumer.group-id=test
spring.kafka.consumer.key-deserializer=org.apache.kafka.common.serialization.StringDeserializer
spring.kafka.consumer.value-deserializer=io.confluent.kafka.serializers.KafkaAvroDeserializer
spring.kafka.streams.application-id=count-aggregator
spring.kafka.streams.properties.commit.interval.ms=0
spring.kafka.streams.properties.replication.factor=1
"""


def found_in(folder: Path, text: str) -> list[tuple[str, str]]:
    """Each finding's rule, and what it says before the comma."""
    file = folder / "app.properties"
    file.write_text(text)
    return [(one.rule.id, one.what.partition(",")[0]) for one in examine_files([file])]


def test_mirror_maker_with_three_brokers_and_one_copy_of_its_positions(tmp_path: Path) -> None:
    """Apache Kafka, config/connect-mirror-maker.properties: it names three brokers in each cluster, and the topics with
    positions get one copy. The file itself says that this is for development. Its heartbeats, configurations and
    statuses hold no positions, so nothing is said of them."""
    assert sorted(found_in(tmp_path, MIRROR_MAKER)) == [
        ("internal-topic-not-replicated", "checkpoints.topic.replication.factor=1"),
        ("internal-topic-not-replicated", "offset.storage.replication.factor=1"),
        ("internal-topic-not-replicated", "offset.syncs.topic.replication.factor=1"),
    ]


def test_a_connect_worker_on_one_broker_can_have_no_second_copy(tmp_path: Path) -> None:
    """Apache Kafka, config/connect-distributed.properties: right for the one broker that it names; with three addresses
    in its place it would be a mistake."""
    assert found_in(tmp_path, CONNECT_WORKER) == []
    larger = CONNECT_WORKER.replace("localhost:9092", "a:9092,b:9092,c:9092")
    assert found_in(tmp_path, larger) == [("internal-topic-not-replicated", "offset.storage.replication.factor=1")]


def test_debezium_server_that_forgets_its_position(tmp_path: Path) -> None:
    """Debezium's examples, openlinage/debezium-server/config/application.properties: the position is in memory, so each
    restart takes a snapshot again. Nothing is wrong with its producer, which has the defaults."""
    assert found_in(tmp_path, DEBEZIUM_TO_KAFKA) == [
        (
            "position-in-memory",
            "debezium.source.offset.storage=org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        )
    ]
    weaker = DEBEZIUM_TO_KAFKA.replace("MemoryOffset", "KafkaOffset") + "debezium.sink.kafka.producer.acks=1\n"
    assert found_in(tmp_path, weaker) == [("acks-not-all", "acks=1")]


def test_debezium_server_with_a_file_and_upserts_is_sound(tmp_path: Path) -> None:
    """Debezium's examples, data-replication/debezium-server/application.properties: what comes again after a restart is
    an upsert by the record's key."""
    assert found_in(tmp_path, DEBEZIUM_TO_JDBC) == []


def test_spring_boot_with_defaults_on_one_broker_is_sound(tmp_path: Path) -> None:
    """Confluent's examples, clients/cloud/java-springboot: no setting is weaker than its default."""
    assert found_in(tmp_path, SPRING_BOOT) == []
