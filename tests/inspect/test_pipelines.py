"""A running pipeline is found by its name, and what is wrong with it is told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from inspect_scene import Scene, scene
from typer.testing import CliRunner

import semel
from semel.advise.pipeline_check import IdFacts, PipelineFacts, check_pipeline
from semel.cli.main import app
from semel.client.partitions import TopicPartition
from semel.inspect.pipelines import find_pipeline, open_times
from semel.inspect.transaction_log import Transition
from semel.spark.ledger import Entry


@pytest.fixture(scope="module", params=[2, 1], ids=["protocol 2", "protocol 1"])
def place(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with scene(0 if request.param == 1 else 2) as found:
        found.admin.create_topics("in", "out", "semel-ledger", "bystander")
        yield found


def commit_batch(place: Scene, name: str, batch: int) -> None:
    """As the sink does it: rows, the ledger's entry and the positions in one transaction."""
    with place.producer(name) as producer, producer.transaction():
        producer.send("out", b"row")
        identity = producer.identity
        entry = Entry(
            query="q",
            batch=batch,
            outputs=["out", "out#2"],
            pipeline=name,
            at_ms=int(time.time() * 1000),
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
        )
        producer.send("semel-ledger", entry.encode(), key=name.encode())
        producer.send_offsets({TopicPartition("in", 0): batch}, name)


def changes(*steps: tuple[str, int]) -> list[Transition]:
    return [Transition(number, at_ms, state, 1, 1, ()) for number, (state, at_ms) in enumerate(steps)]


def test_a_sink_is_found_with_its_batch_group_topics_and_id(place: Scene) -> None:
    """And another pipeline, whose name begins with the same letters, is not taken for it."""
    commit_batch(place, "orders", 7)
    commit_batch(place, "orders-old", 3)
    found = find_pipeline(place.cluster, "orders")
    assert found.not_seen == []
    assert (found.last_batch, found.group) == ("batch 7", "orders")
    assert found.topics == ["in", "out", "semel-ledger"]
    assert [one.transactional_id for one in found.ids] == ["orders"]
    assert len(found.ids[0].open_ms) == 1
    assert list(check_pipeline(found)) == []


def test_a_session_and_a_relay_are_found_by_their_ids(place: Scene) -> None:
    """A session's begin with its name, a relay's has it in it."""
    for name in ("upper-0", "upper-1", "/relay/upper"):
        place.producer(name).close()
    found = find_pipeline(place.cluster, "upper")
    assert sorted(one.transactional_id for one in found.ids) == ["/relay/upper", "upper-0", "upper-1"]
    assert not find_pipeline(place.cluster, "nobody").is_known


def test_the_open_time_of_each_transaction_is_read_from_the_log() -> None:
    """From its first record to its decision; later additions of partitions do not begin it anew."""
    log = changes(
        ("Empty", 0), ("Ongoing", 10), ("Ongoing", 25), ("PrepareCommit", 40), ("CompleteCommit", 45), ("Ongoing", 100)
    )
    assert list(open_times(log, now_ms=160)) == [30, 60]


@pytest.mark.parametrize(("longest_ms", "rules"), [(41_000, ["transaction-timeout-too-short"]), (40_000, [])])
def test_a_timeout_that_transactions_come_close_to_is_told(longest_ms: int, rules: list[str]) -> None:
    """Two thirds are the limit."""
    facts = PipelineFacts("orders", [IdFacts("orders", "Ongoing", 60_000, (500, longest_ms))])
    assert [one.rule.id for one in check_pipeline(facts)] == rules


def test_the_command_tells_of_the_pipeline_and_of_its_topics_alone(place: Scene) -> None:
    """A slow transaction, and a topic that refuses writes: the pipeline's is told, a bystander's is not."""
    commit_batch(place, "slow", 1)
    with place.producer("slow-job") as producer:
        pass
    producer = semel.Producer({**place.settings, "transactional.id": "slow/2", "transaction.timeout.ms": 900})
    producer.begin()
    producer.send("out", b"row")
    producer.flush()
    time.sleep(0.7)  # it is the age itself that is looked at
    producer.abort()
    producer.close()
    for topic in ("in", "bystander"):
        place.admin.alter_configs("topic", topic, {"min.insync.replicas": "2"})
    try:
        asked = ["doctor", "--bootstrap", place.bootstrap, "--pipeline", "slow", "--watch", "0s"]
        said = CliRunner().invoke(app, [*asked, "--json"])
        shown = CliRunner().invoke(app, asked)
    finally:
        for topic in ("in", "bystander"):
            place.admin.alter_configs("topic", topic, {"min.insync.replicas": None})
    found = json.loads(said.stdout)
    told = {one["rule"]: one["where"] for one in found["findings"]}
    assert told["transaction-timeout-too-short"] == "transactional.id slow/2"
    assert told["min-insync-replicas-too-high"] == "in"
    assert said.exit_code == 1
    assert found["pipeline"]["last_batch"] == "batch 1"
    assert "  last committed: batch 1, " in shown.output
    assert "transactional.id: slow/2, " in shown.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pipeline", "ordres"], "Nothing in this cluster is of a pipeline 'ordres'"),
        (["--pipeline", "orders", "--without"], "name it with --bootstrap"),
    ],
)
def test_a_pipeline_that_cannot_be_looked_at_is_one_sentence(place: Scene, arguments: list[str], says: str) -> None:
    """Status 2, as everything that the doctor could not look at."""
    has_cluster = "--without" not in arguments
    cluster = ["--bootstrap", place.bootstrap] if has_cluster else []
    said = CliRunner().invoke(app, ["doctor", *cluster, *arguments[:2]])
    assert said.exit_code == 2, said.output
    assert says in said.output
