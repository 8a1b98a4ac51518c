"""The doctor's rules about clusters: on values, and on the embedded broker."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import confluent_kafka
import pytest
from typer.testing import CliRunner

import semel
from semel.advise.cluster_check import check_cluster
from semel.advise.cluster_facts import ClusterFacts, GroupPosition, IdLook, TopicFacts
from semel.advise.examine import examine_cluster
from semel.advise.rules import RULES
from semel.cli.main import app

GOOD = TopicFacts("orders", False, 3, 2, False)


def facts(**changes: object) -> ClusterFacts:
    whole = ClusterFacts("b:9092", 3, 2, True, {"offsets.retention.minutes": "10080"}, [GOOD])
    return replace(whole, **changes)  # type: ignore[arg-type]


def position(committed: int, stable: int, end: int) -> GroupPosition:
    return GroupPosition("billing", "orders", 0, committed, stable, end)


def looks(*epochs: int, state: str = "Ongoing") -> list[list[IdLook]]:
    return [[IdLook("orders-0", state, 7, epoch)] for epoch in epochs]


# rule: (what a cluster with the mistake shows, what one without it shows)
CLUSTERS: dict[str, tuple[ClusterFacts, ClusterFacts]] = {
    "internal-topic-not-replicated": (
        facts(topics=[replace(GOOD, name="__transaction_state", replication=1, min_insync_replicas=1)]),
        facts(broker_count=1, topics=[replace(GOOD, name="__transaction_state", replication=1, min_insync_replicas=1)]),
    ),
    "topic-not-replicated": (facts(topics=[replace(GOOD, replication=1, min_insync_replicas=1)]), facts()),
    "min-insync-replicas-too-high": (
        facts(broker_count=1, topics=[replace(GOOD, replication=1)]),
        facts(topics=[replace(GOOD, min_insync_replicas=2)]),
    ),
    "min-insync-replicas-equal-replication": (facts(topics=[replace(GOOD, min_insync_replicas=3)]), facts()),
    "min-insync-replicas-too-low": (
        facts(topics=[replace(GOOD, min_insync_replicas=1)]),
        facts(topics=[replace(GOOD, replication=2, min_insync_replicas=1)]),
    ),
    "unclean-leader-election": (facts(topics=[replace(GOOD, may_elect_unclean=True)]), facts()),
    "transaction-protocol-1": (facts(transaction_protocol=1), facts()),
    "group-reads-uncommitted": (
        facts(positions=[position(committed=8, stable=5, end=10)]),
        # at the last stable offset, and with the position of a topic that was deleted and created again
        facts(positions=[position(committed=5, stable=5, end=10), position(committed=80, stable=5, end=10)]),
    ),
    "transactional-id-fought-over": (
        facts(transaction_protocol=1, looks=looks(4, 5, 6, 6)),
        facts(transaction_protocol=1, looks=looks(4, 4, 5, 5)),
    ),
    "many-producers": (facts(producer_counts={("orders", 0): 5_000}), facts(producer_counts={("orders", 0): 4_999})),
    "producer-epoch-near-its-end": (facts(looks=looks(32_100)), facts(looks=looks(31_000))),
}


@pytest.mark.parametrize("rule", CLUSTERS)
def test_a_mistake_in_a_cluster_is_found_and_its_neighbour_is_not(rule: str) -> None:
    """By what is seen alone. Only the rule about the protocol may speak beside another one."""
    bad, good = CLUSTERS[rule]
    assert [one.rule.id for one in check_cluster(bad) if one.rule.id == rule] == [rule]
    assert rule not in [one.rule.id for one in check_cluster(good)]


def test_a_pause_that_is_longer_than_offsets_last_is_an_error() -> None:
    """Only where the pause is known."""
    day = 86_400
    assert [one.rule.id for one in check_cluster(facts(), longest_pause_s=8 * day)] == ["offsets-expire"]
    assert list(check_cluster(facts(), longest_pause_s=6 * day)) == []
    assert list(check_cluster(facts())) == []


def test_epochs_that_grow_with_transactions_are_no_quarrel() -> None:
    """Protocol 2 gives each transaction an epoch of its own. Without any transaction the growth means restarts."""
    assert list(check_cluster(facts(looks=looks(4, 9, 15)))) == []
    assert [one.rule.id for one in check_cluster(facts(looks=looks(4, 5, 6, state="Empty")))] == [
        "transactional-id-fought-over"
    ]


def test_every_rule_about_clusters_has_its_cases() -> None:
    """Those with numbers from outside have tests of their own; tests/inspect/test_pipelines.py has the last."""
    others = {"offsets-expire", "transaction-timeout-above-broker-maximum", "transaction-timeout-too-short"}
    assert set(CLUSTERS) | others == {rule.id for rule in RULES.values() if "cluster" in rule.places}


def test_many_topics_with_one_mistake_are_one_finding() -> None:
    """With the commands for the first few."""
    topics = [replace(GOOD, name=f"topic-{number}", min_insync_replicas=1) for number in range(200)]
    (found,) = check_cluster(facts(topics=topics))
    assert found.where.endswith("and 195 more")
    assert len(found.commands) == 5
    assert "--entity-name topic-0 --add-config min.insync.replicas=2" in found.commands[0]


# -- on the embedded broker ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with semel.Broker(config={"transaction.max.timeout.ms": 120_000, "offsets.retention.minutes": 60}) as broker:
        yield broker.bootstrap


@pytest.fixture
def topic(bootstrap: str) -> str:
    name = f"topic-{uuid.uuid4().hex[:8]}"
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name)
    return name


def rules_of(bootstrap: str, topic: str, **options: float) -> list[str]:
    findings, seen = examine_cluster({"bootstrap.servers": bootstrap}, topics=[topic], watch_s=0.0, **options)
    assert seen.not_seen == []
    return [one.rule.id for one in findings]


def test_a_sound_broker_has_nothing(bootstrap: str, topic: str) -> None:
    """One broker with its defaults."""
    assert rules_of(bootstrap, topic) == []


def test_a_broker_of_the_old_protocol_is_seen() -> None:
    """transaction.version is not finalized at 2."""
    with semel.Broker(config={"transaction.version": "1"}, fsync="never") as old:
        findings, _ = examine_cluster({"bootstrap.servers": old.bootstrap}, watch_s=0.0)
    assert [one.rule.id for one in findings] == ["transaction-protocol-1"]


def test_offsets_that_expire_are_seen_on_the_broker(bootstrap: str, topic: str) -> None:
    """From its own setting."""
    assert rules_of(bootstrap, topic, longest_pause_s=7_200) == ["offsets-expire"]
    assert rules_of(bootstrap, topic, longest_pause_s=1_800) == []


def test_a_topic_that_refuses_every_transaction_is_seen(bootstrap: str) -> None:
    """min.insync.replicas above the number of replicas."""
    name = f"closed-{uuid.uuid4().hex[:8]}"
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name, config={"min.insync.replicas": "2"})
    assert rules_of(bootstrap, name) == ["min-insync-replicas-too-high"]


@pytest.mark.parametrize(
    ("isolation", "rules"), [("read_uncommitted", ["group-reads-uncommitted"]), ("read_committed", [])]
)
def test_a_group_that_reads_open_transactions_is_seen(
    bootstrap: str, topic: str, isolation: str, rules: list[str]
) -> None:
    """While the transaction is open, by what the group has committed."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"committed")
    producer.commit_transaction(30)
    producer.begin_transaction()
    producer.produce(topic, b"open")
    assert producer.flush(30) == 0
    reader = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"readers-of-{topic}",
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    reader.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    for _ in range(1 if isolation == "read_committed" else 2):
        message = reader.poll(30)
        assert message is not None
        assert message.error() is None
    reader.commit(asynchronous=False)
    reader.close()
    assert rules_of(bootstrap, topic) == rules
    producer.abort_transaction(30)
    assert rules_of(bootstrap, topic) == []


def test_instances_that_fence_each_other_are_seen(bootstrap: str, topic: str) -> None:
    """The id is initialised again between two looks, each time by another producer."""
    from semel.advise.cluster_facts import collect_facts

    def start_another(_: float) -> None:
        semel.Producer(bootstrap_servers=bootstrap, transactional_id=topic).close()

    start_another(0)
    seen = collect_facts({"bootstrap.servers": bootstrap}, topics=[topic], wait=start_another)
    found = [one for one in check_cluster(seen) if topic in one.where]
    assert [one.rule.id for one in found] == ["transactional-id-fought-over"]
    calm = collect_facts({"bootstrap.servers": bootstrap}, topics=[topic], watch_s=0.0)
    assert [one for one in check_cluster(calm) if topic in one.where] == []


def test_producers_of_a_partition_are_counted(bootstrap: str, topic: str) -> None:
    """Each that wrote, once."""
    for _ in range(3):
        with semel.Producer(bootstrap_servers=bootstrap) as producer:
            producer.send(topic, b"x")
    _, seen = examine_cluster({"bootstrap.servers": bootstrap}, topics=[topic], watch_s=0.0)
    assert seen.producer_counts == {(topic, 0): 3}


# -- the command -----------------------------------------------------------------------------------------------


def test_settings_are_compared_with_the_cluster_they_are_for(bootstrap: str, tmp_path: Path) -> None:
    """A transaction timeout that this cluster refuses, in settings and in a program; exit status 1."""
    (tmp_path / "app.properties").write_text("transactional.id=a\ntransaction.timeout.ms=180000\n")
    (tmp_path / "app.py").write_text(
        "import semel\nsemel.Producer(transactional_id='b', transaction_timeout_ms=180_000)\n"
    )
    (tmp_path / "fine.properties").write_text("transactional.id=c\ntransaction.timeout.ms=60000\n")
    files = [str(tmp_path / name) for name in ("app.properties", "app.py", "fine.properties")]
    said = CliRunner().invoke(app, ["doctor", "--bootstrap", bootstrap, "--watch", "0s", "--json", *files])
    assert said.exit_code == 1, said.output
    found = json.loads(said.stdout)
    wrong = [one for one in found["findings"] if one["rule"] == "transaction-timeout-above-broker-maximum"]
    assert [Path(one["where"]).name for one in wrong] == ["app.properties:2", "app.py:2"]
    assert wrong[0]["commands"] == ["transaction.timeout.ms=120000"]
    assert wrong[0]["link"] == "docs/doctor.md#transaction-timeout-above-broker-maximum"
    assert found["not_seen"] == []


def test_fix_prints_the_commands_and_changes_nothing(bootstrap: str, topic: str) -> None:
    """The command that it prints is the one that would help."""
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.alter_configs("topic", topic, {"min.insync.replicas": "2"})
        asked = ["doctor", "--bootstrap", bootstrap, "--topic", topic, "--watch", "0s", "--fix"]
        said = CliRunner().invoke(app, asked)
        assert said.exit_code == 1
        command = f"--bootstrap-server {bootstrap} --alter --entity-type topics --entity-name {topic} --add-config"
        assert f"kafka-configs.sh {command} min.insync.replicas=1" in said.output
        assert admin.describe_configs("topic", topic)["min.insync.replicas"].value == "2"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "There is nothing to look at"),
        (["gone.py"], "gone.py is not there"),
        (["--bootstrap", "127.0.0.1:1", "--config", "short.properties"], "127.0.0.1:1"),
        (["--bootstrap", "nonsense"], "nonsense"),
        (["--longest-pause", "soon", "x.py"], "is no time"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence_and_status_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stack trace, and never a clean bill of health."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.properties").write_text("default.api.timeout.ms=500\nrequest.timeout.ms=400\n")
    said = CliRunner().invoke(app, ["doctor", *arguments])
    assert said.exit_code == 2, said.output
    assert "Could not look:" in said.output
    assert says in said.output
    assert isinstance(said.exception, SystemExit)


def test_a_topic_that_is_not_there_is_said(bootstrap: str) -> None:
    """A mistyped name must not look like a sound topic."""
    said = CliRunner().invoke(app, ["doctor", "--bootstrap", bootstrap, "--topic", "ordres", "--watch", "0s"])
    assert said.exit_code == 2
    assert "There is no topic 'ordres'" in said.output


def test_warnings_alone_leave_status_0(tmp_path: Path) -> None:
    """Only errors fail a build."""
    (tmp_path / "app.properties").write_text("acks=1\n")
    said = CliRunner().invoke(app, ["doctor", str(tmp_path / "app.properties")])
    assert said.exit_code == 0
    assert "acks-not-all" in said.output
    assert "1 warning." in said.output


def test_the_rules_can_be_listed() -> None:
    """For people and for programs."""
    assert CliRunner().invoke(app, ["doctor", "--rules"]).output.count("\n") == len(RULES)
    listed = json.loads(CliRunner().invoke(app, ["doctor", "--rules", "--json"]).stdout)
    assert [one["id"] for one in listed] == list(RULES)
