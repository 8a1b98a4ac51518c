"""Each rule about settings and programs: one case that it is about, and one close to it that is all right."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from semel.advise.examine import examine_files, examine_settings
from semel.advise.rules import RULES, rules_as_markdown
from semel.errors import ConfigError

TRANSACTIONAL = {"transactional.id": "orders-0"}

# rule: (settings with the mistake, settings without it)
SETTINGS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "transaction-timeout-not-below-session-timeout": (
        {**TRANSACTIONAL, "group.id": "g", "transaction.timeout.ms": 60_000, "session.timeout.ms": 45_000},
        {**TRANSACTIONAL, "group.id": "g", "transaction.timeout.ms": 30_000, "session.timeout.ms": 45_000},
    ),
    "heartbeat-too-slow": (
        {"group.id": "g", "heartbeat.interval.ms": 5_000, "session.timeout.ms": 10_000},
        {"group.id": "g", "heartbeat.interval.ms": 3_000, "session.timeout.ms": 10_000},
    ),
    "idempotence-contradicted": ({**TRANSACTIONAL, "acks": "1"}, {**TRANSACTIONAL, "acks": "all"}),
    "acks-not-all": ({"acks": 1}, {"acks": -1}),
    "idempotence-off": ({"enable.idempotence": False}, {"enable.idempotence": True}),
    "retries-off": ({"retries": 0}, {"retries": 3}),
    "transactional-id-changes": ({"transactional.id": "tx-${random.uuid}"}, {"transactional.id": "tx-${HOSTNAME}"}),
    "transactional-id-changes-in-group": (
        {"transactional.id": "tx-${random.uuid}", "group.id": "g"},
        {"transactional.id": "tx-0", "group.id": "g"},
    ),
    "auto-commit-with-transactions": (
        {**TRANSACTIONAL, "enable_auto_commit": True},
        {**TRANSACTIONAL, "enable_auto_commit": False},
    ),
    "read-uncommitted-beside-transactions": (
        {**TRANSACTIONAL, "isolation.level": "read_uncommitted"},
        {"isolation.level": "read_uncommitted"},
    ),
    "checkpoint-without-atomic-rename": (
        {"checkpointLocation": "s3a://bucket/orders"},
        {
            "checkpointLocation": "s3a://bucket/orders",
            "spark.sql.streaming.checkpointFileManagerClass": "AbortableStreamBasedCheckpointFileManager",
        },
    ),
    "checkpoint-in-temporary-folder": ({"checkpointLocation": "/tmp/orders"}, {"checkpointLocation": "/tmpfs/orders"}),
    "position-in-memory": (
        {"offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore"},
        {"offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore"},
    ),
    "internal-topic-not-replicated": (
        {"bootstrap.servers": "a:9092,b:9092", "offset.storage.replication.factor": 1},
        {"bootstrap.servers": "a:9092", "offset.storage.replication.factor": 1},
    ),
    "data-loss-accepted": ({"failOnDataLoss": "false"}, {"failOnDataLoss": "true"}),
}

CONFLUENT = "import uuid, os\nfrom confluent_kafka import Consumer, Producer\n"
POSTGRES = f"{CONFLUENT}import psycopg\nconnection = psycopg.connect('')\nproducer = Producer(settings)\n"
SPARK = "from pyspark.sql import SparkSession\n"

# (rule, a program with the mistake, a program without it)
PROGRAMS: list[tuple[str, str, str]] = [
    (
        "idempotence-not-on",
        f"{CONFLUENT}p = Producer({{'bootstrap.servers': 'b'}})",
        f"{CONFLUENT}p = Producer({{'bootstrap.servers': 'b', 'enable.idempotence': True}})",
    ),
    (
        "idempotence-contradicted",
        f"{CONFLUENT}conf = {{'transactional.id': 'a'}}\nconf['acks'] = '1'\np = Producer(conf)",
        f"{CONFLUENT}conf = {{'transactional.id': 'a'}}\nother = {{}}\nother['acks'] = '1'\np = Producer(conf)",
    ),
    (
        "acks-not-all",
        "from kafka import KafkaProducer\nKafkaProducer(bootstrap_servers='b', acks=1)",
        "from kafka import KafkaProducer\nKafkaProducer(bootstrap_servers='b', acks='all')",
    ),
    (
        "transactional-id-changes",
        f"{CONFLUENT}p = Producer({{'transactional.id': f'orders-{{uuid.uuid4()}}'}})\np.commit_transaction()",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'orders-' + os.environ['HOSTNAME']}})\np.commit_transaction()",
    ),
    (
        "transactional-id-changes",
        "import os\nimport aiokafka\nme = f'w-{os.getpid()}'\n"
        "p = aiokafka.AIOKafkaProducer(transactional_id=me)\np.transaction()",
        "import uuid\nimport aiokafka\n"
        "p = aiokafka.AIOKafkaProducer(transactional_id=str(uuid.uuid5(uuid.NAMESPACE_DNS, 'w')))\np.transaction()",
    ),
    (
        "transactional-id-changes",
        f"{CONFLUENT}p = Producer({{'transactional.id': str(uuid.uuid4())}})\np.commit_transaction()",
        f"{CONFLUENT}p = Producer({{'transactional.id': str(uuid.uuid4())}})",  # a wrapper: others use it
    ),
    (
        "transactional-id-changes-in-group",
        f"{CONFLUENT}p = Producer({{'transactional.id': str(uuid.uuid4())}})\n"
        "p.send_offsets_to_transaction(offsets, metadata)",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'a'}})\np.send_offsets_to_transaction(offsets, metadata)",
    ),
    (
        "transactional-id-shared",
        f"{CONFLUENT}producers = [Producer({{'transactional.id': 'a'}}) for _ in range(4)]",
        f"{CONFLUENT}producers = [Producer({{'transactional.id': f'a-{{n}}'}}) for n in range(4)]",
    ),
    (
        "transactional-id-shared",
        f"{CONFLUENT}from threading import Thread\ndef work():\n    p = Producer({{'transactional.id': 'a'}})\n"
        "for _ in range(3):\n    Thread(target=work).start()",
        f"{CONFLUENT}from threading import Thread\ndef work():\n    p = Producer({{'transactional.id': 'a'}})\n"
        "Thread(target=work).start()",
    ),
    (
        "transactional-id-shared",
        f"{CONFLUENT}orders = Producer({{'transactional.id': 'a'}})\nbills = Producer({{'transactional.id': 'a'}})",
        # one after the other, as after an error
        f"{CONFLUENT}while True:\n    p = Producer({{'transactional.id': 'a'}})\n    run(p)",
    ),
    (
        "auto-commit-with-transactions",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'a'}})\nc = Consumer({{'group.id': 'g'}})\n"
        "p.send_offsets_to_transaction(offsets, c.consumer_group_metadata())",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'a'}})\nc = Consumer({{**common, 'group.id': 'g'}})\n"
        "p.send_offsets_to_transaction(offsets, c.consumer_group_metadata())",
    ),
    (
        "auto-commit-with-transactions",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'a'}})\nc = Consumer({{'group.id': 'g'}})\nm = c.poll(1)\n"
        "p.begin_transaction()\np.produce('out', m.value())\np.commit_transaction()",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'a'}})\nc = Consumer({{'group.id': 'g'}})\nm = c.poll(1)\n"
        "p.begin_transaction()\np.produce('out', b'of something else')\np.commit_transaction()",
    ),
    (
        "http-call-in-transaction",
        f"{CONFLUENT}import requests\np.begin_transaction()\nrequests.post('http://a')\np.commit_transaction()",
        f"{CONFLUENT}import requests\np.begin_transaction()\nrequests.get('http://a')\np.commit_transaction()",
    ),
    (
        "read-uncommitted-beside-transactions",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'a'}})\n"
        "c = Consumer({'group.id': 'g', 'enable.auto.commit': False, 'isolation.level': 'read_uncommitted'})\n"
        "p.send_offsets_to_transaction(offsets, c.consumer_group_metadata())",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'a'}})\n"
        "c = Consumer({'group.id': 'monitor', 'isolation.level': 'read_uncommitted'})",
    ),
    (
        "transaction-timeout-not-below-session-timeout",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'a'}})\n"
        "c = Consumer({'group.id': 'g', 'enable.auto.commit': False, 'session.timeout.ms': 10_000})\n"
        "p.send_offsets_to_transaction(offsets, c.consumer_group_metadata())",
        f"{CONFLUENT}p = Producer({{'transactional.id': 'a', 'transaction.timeout.ms': 6_000}})\n"
        "c = Consumer({'group.id': 'g', 'enable.auto.commit': False, 'session.timeout.ms': 10_000})\n"
        "p.send_offsets_to_transaction(offsets, c.consumer_group_metadata())",
    ),
    (
        "database-write-in-transaction",
        f"{POSTGRES}producer.begin_transaction()\nconnection.execute('INSERT INTO orders VALUES (1)')\n"
        "producer.commit_transaction()",
        f"{POSTGRES}producer.begin_transaction()\nrow = connection.execute('SELECT * FROM orders')\n"
        "producer.commit_transaction()\nconnection.execute('INSERT INTO done VALUES (1)')",
    ),
    (
        "database-write-in-transaction",  # through a method, in a loop, with the cursor of another function
        "import sqlite3\nfrom kafka import KafkaProducer\n"
        "class Copier:\n"
        "    def save(self, order):\n"
        "        self.database.cursor().executemany('  insert into orders values (?)', order)\n"
        "    def run(self):\n"
        "        while True:\n"
        "            self.producer.begin_transaction()\n"
        "            try:\n"
        "                self.save(1)\n"
        "                self.producer.commit_transaction()\n"
        "            except Exception:\n"
        "                self.producer.abort_transaction()\n",
        "import sqlite3\nfrom kafka import KafkaProducer\n"
        "class Copier:\n"
        "    def save(self, order):\n"
        "        self.database.cursor().executemany('insert into orders values (?)', order)\n"
        "    def run(self):\n"
        "        while True:\n"
        "            self.producer.begin_transaction()\n"
        "            try:\n"
        "                if bad():\n"
        "                    self.producer.abort_transaction()\n"
        "                    self.save('after the abort')\n"
        "                    continue\n"
        "                self.producer.commit_transaction()\n"
        "            except Exception:\n"
        "                self.save('in the handler')\n",
    ),
    (
        "database-write-in-transaction",
        "import aiokafka, sqlalchemy as sa\n"
        "async def main():\n"
        "    producer = aiokafka.AIOKafkaProducer(transactional_id='a')\n"
        "    async with producer.transaction():\n"
        "        await session.execute(sa.insert(orders).values(id=1))\n",
        "import aiokafka, sqlalchemy as sa\n"
        "async def main():\n"
        "    producer = aiokafka.AIOKafkaProducer(transactional_id='a')\n"
        "    async with engine.transaction():\n"
        "        await session.execute(sa.insert(orders).values(id=1))\n",
    ),
    (
        "database-write-in-transaction",
        "import semel\nfrom sqlalchemy.orm import sessionmaker\n"
        "Database = sessionmaker()\nproducer = semel.Producer(transactional_id='a')\n"
        "with Database() as database, producer.transaction():\n    database.add(order)\n",
        "import semel\nfrom sqlalchemy.orm import sessionmaker\n"
        "Database = sessionmaker()\nseen = set()\nproducer = semel.Producer(transactional_id='a')\n"
        "with Database() as database, producer.transaction():\n    seen.add(order)\n",
    ),
    (
        "database-write-in-transaction",
        "import psycopg, semel\n"
        "with semel.Session(group='g', topics=['t'], name='n') as session:\n"
        "    for transaction in session:\n"
        "        connection.execute('UPDATE stock SET count = count - 1')\n",
        "import psycopg, semel\n"  # the inbox commits both by the database's own transaction
        "with semel.Inbox(connection, topics=['t'], name='n') as inbox:\n"
        "    for delivery in inbox:\n"
        "        with delivery as database:\n"
        "            database.execute('UPDATE stock SET count = count - 1')\n",
    ),
    (
        "database-write-in-transaction",
        "import sqlite3, semel\n"
        "def double(row):\n    database.execute('DELETE FROM carts')\n    return row.value\n"
        "semel.run(double, by='row', to='doubled', group='g', topics=['t'], name='n')",
        "import sqlite3, semel\n"
        "def double(row):\n    database.execute('SELECT 1')\n    return row.value\n"
        "semel.run(double, by='row', to='doubled', group='g', topics=['t'], name='n')",
    ),
    (
        "foreach-batch-repeats",
        f"{SPARK}def each(df, batch_id):\n    print(batch_id)\n"
        "    df.write.format('jdbc').option('url', u).mode('append').save()\n"
        "df.writeStream.foreachBatch(each).start()",
        f"{SPARK}def each(df, batch_id):\n"
        "    df.withColumn('batch', lit(batch_id)).write.format('jdbc').mode('append').save()\n"
        "df.writeStream.foreachBatch(each).start()",
    ),
    (
        "foreach-batch-repeats",
        f"{SPARK}df.writeStream.foreachBatch(lambda df, _: df.write.format('kafka').save()).start()",
        f"{SPARK}df.writeStream.foreachBatch(lambda df, _: df.write.mode('overwrite').parquet(path)).start()",
    ),
    (
        "spark-kafka-sink-repeats",
        f"{SPARK}df.writeStream.format('kafka').option('topic', 't').start()",
        f"{SPARK}df.writeStream.format('console').start()\nspark.readStream.format('kafka').load()",
    ),
    (
        "checkpoint-without-atomic-rename",
        f"{SPARK}df.writeStream.option('checkpointLocation', f's3a://{{bucket}}/c').start()",
        f"{SPARK}df.writeStream.option('checkpointLocation', f'abfss://{{container}}/c').start()",
    ),
    (
        "checkpoint-without-atomic-rename",
        "import semel\nsemel.write_stream(df, name='n', bootstrap=b, topic='t', checkpoint='gs://bucket/c')",
        "import semel\nsemel.write_stream(df, name='n', bootstrap=b, topic='t', checkpoint='hdfs://bucket/c')",
    ),
    (
        "checkpoint-in-temporary-folder",
        f"{SPARK}df.writeStream.options(checkpointLocation='/tmp/c').start()",
        f"{SPARK}df.writeStream.options(checkpointLocation='/data/c').start()",
    ),
    (
        "data-loss-accepted",
        f"{SPARK}spark.readStream.format('kafka').option('failOnDataLoss', 'false').load()",
        f"{SPARK}spark.readStream.format('kafka').option('failOnDataLoss', 'true').load()",
    ),
]
ONLY_IN_CLUSTERS = {rule.id for rule in RULES.values() if "cluster" in rule.places}
"""tests/advise/test_doctor_cluster.py and tests/conformance/test_doctor.py have these."""


def rules_in(folder: Path, program: str) -> list[str]:
    file = folder / "program.py"
    file.write_text(program)
    return [one.rule.id for one in examine_files([file])]


@pytest.mark.parametrize("rule", SETTINGS)
def test_a_mistake_in_settings_is_found_and_its_neighbour_is_not(rule: str) -> None:
    """The finding is the only one, and names a way out."""
    bad, good = SETTINGS[rule]
    assert [one.rule.id for one in examine_settings(bad)] == [rule]
    assert examine_settings(good) == []


@pytest.mark.parametrize(("rule", "bad", "good"), PROGRAMS, ids=[f"{one[0]}-{n}" for n, one in enumerate(PROGRAMS)])
def test_a_mistake_in_a_program_is_found_and_its_neighbour_is_not(
    rule: str, bad: str, good: str, tmp_path: Path
) -> None:
    """From the syntax tree alone: names such as `settings` and `connection` need not exist."""
    assert rule in rules_in(tmp_path, bad)
    assert rule not in rules_in(tmp_path, good)


def test_every_rule_has_its_cases() -> None:
    """A rule is not added without showing when it speaks and when it is silent."""
    covered = set(SETTINGS) | {rule for rule, _, _ in PROGRAMS} | ONLY_IN_CLUSTERS
    assert covered == set(RULES)
    in_code = {rule.id for rule in RULES.values() if rule.places == ("code",)}
    assert in_code <= {rule for rule, _, _ in PROGRAMS}


def test_the_page_describes_every_rule_as_the_code_has_it() -> None:
    """docs/doctor.md has the table and the sections of the code, and every link leads to one."""
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert rules_as_markdown() in page, "put what rules_as_markdown() returns below '## Rules' in docs/doctor.md"
    headings = set(re.findall(r"^### (.+)$", page, re.MULTILINE))
    assert {rule.link.partition("#")[2] for rule in RULES.values()} == headings


def test_two_files_with_one_transactional_id_are_two_instances_that_share_it(tmp_path: Path) -> None:
    """As the settings of two deployments are compared before they are rolled out. Two clusters are two worlds."""
    (tmp_path / "a.properties").write_text("transactional.id=orders\n")
    (tmp_path / "b.json").write_text('{"transactional.id": "orders"}')
    (tmp_path / "c.json").write_text('{"producer": {"transactional.id": "orders-2"}}')
    shared = examine_files([tmp_path / "a.properties", tmp_path / "b.json"])
    assert [one.rule.id for one in shared] == ["transactional-id-shared"]
    assert "a.properties:1" in shared[0].what
    assert examine_files([tmp_path / "a.properties", tmp_path / "c.json"]) == []
    for stage in ("test", "live"):
        text = f"transactional.id=orders\nbootstrap.servers=kafka.{stage}:9092\n"
        (tmp_path / f"{stage}.properties").write_text(text)
    assert examine_files([tmp_path / "test.properties", tmp_path / "live.properties"]) == []


@pytest.mark.parametrize(
    ("name", "text", "rules"),
    [
        ("app.properties", "# acks=0\nacks : 1\n", ["acks-not-all"]),
        ("app.properties", "bootstrap.servers=a:9092,\\\n  b:9092\nretries=0\n", ["retries-off"]),
        (
            "application.properties",
            "spring.kafka.producer.transaction-id-prefix=tx-${random.uuid}-\n"
            "spring.kafka.consumer.enable-auto-commit=true\n",
            ["auto-commit-with-transactions", "transactional-id-changes-in-group"],
        ),
        ("connect.properties", "producer.acks=1\nconsumer.isolation.level=read_committed\n", ["acks-not-all"]),
        (
            "spark-defaults.conf",
            "spark.sql.streaming.checkpointLocation s3a://b/c\nspark.master local[2]\n",
            ["checkpoint-without-atomic-rename"],
        ),
        ("spark.json", '{"kafka.bootstrap.servers": "b:1", "failOnDataLoss": false}', ["data-loss-accepted"]),
        ("server.properties", "producer.id.expiration.ms=86400000\nmin.insync.replicas=2\nlisteners=a\n", []),
        ("application.yml", "spring: {kafka: {producer: {transaction-id-prefix: tx-}, consumer: {group-id: g}}}", []),
        (
            "application.yml",
            "spring.kafka:\n  bootstrap-servers: [a:9092, b:9092]\n  producer:\n    transaction-id-prefix: tx-\n"
            '    properties:\n      "[acks]": 1\n  consumer: {enable-auto-commit: yes, isolation-level: null}\n'
            "---\nspring.config.activate.on-profile: test\n",
            ["auto-commit-with-transactions", "acks-not-all"],
        ),
        ("client.yaml", "base: &base {retries: 0}\nproducer:\n  <<: *base\n  acks: all\n", ["retries-off"]),
        ("connector.yaml", "name: a\nconfig:\n  producer.override.acks: 1\n", ["acks-not-all"]),
        ("deployment.yaml", "apiVersion: apps/v1\nkind: Deployment\nspec: {config: {revisions: 3}, retries: 0}\n", []),
    ],
)
def test_files_of_settings_are_read_as_their_programs_read_them(
    name: str, text: str, rules: list[str], tmp_path: Path
) -> None:
    """Java's properties, Spring's and Connect's prefixes, Spark's defaults, JSON, YAML."""
    (tmp_path / name).write_text(text)
    assert [one.rule.id for one in examine_files([tmp_path / name])] == rules


def test_a_finding_names_its_line(tmp_path: Path) -> None:
    """Of a file of settings and of a program."""
    (tmp_path / "app.properties").write_text("\n\nacks=1\n")
    (tmp_path / "app.py").write_text(f"{CONFLUENT}\nconf = {{\n  'acks': 1,\n}}\nProducer(conf)\n")
    places = [Path(one.where).name for one in examine_files([tmp_path / "app.properties", tmp_path / "app.py"])]
    assert places == ["app.properties:3", "app.py:5"]


def test_resources_of_kubernetes_are_read_for_what_they_hand_to_kafka(tmp_path: Path) -> None:
    """Strimzi's `config`, with the cluster that it is for, and the files in a ConfigMap; each place is named."""
    file = tmp_path / "connect.yaml"
    file.write_text(
        dedent(
            """\
            apiVersion: kafka.strimzi.io/v1beta2
            kind: KafkaConnect
            spec:
              replicas: 3
              bootstrapServers: a:9092,b:9092
              config:
                group.id: connect
                offset.storage.replication.factor: 1
                status.storage.replication.factor: -1
            ---
            apiVersion: v1
            kind: ConfigMap
            data:
              producer.properties: |
                acks=0
              application.yml: |
                spring:
                  kafka: {producer: {retries: 0}}
              notes.txt: acks=1
            """
        )
    )
    told = [(one.rule.id, one.where.removeprefix(f"{file} ")) for one in examine_files([file])]
    assert told == [
        ("internal-topic-not-replicated", "(KafkaConnect spec.config):8"),
        ("acks-not-all", "(producer.properties):1"),
        ("retries-off", "(application.yml):2"),
    ]


def test_yaml_without_its_reader_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "app.yml").write_text("acks: 1\n")
    with pytest.raises(ConfigError, match=r"Install it: pip install 'semel\[yaml\]'"):
        examine_files([tmp_path / "app.yml"])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("app.yml", "a: [1", "is not YAML"),
        ("app.yml", "{{ a helm template }}: 1\n---\n{{", "is not YAML"),
        ("app.yml", "", "has no settings"),
        ("app.yml", "- acks: 1", "has no settings"),
        ("app.yml", "a: &a {b: &b {c: *a}}", "has no settings"),
        ("app.py", "def f(:", "is not Python"),
        ("app.json", "{", "is not JSON"),
        ("app.json", "[1]", "must be a JSON object"),
        ("app.properties", "", "has no settings"),
        ("app.properties", b"\xff\xfe", "cannot be read"),
        ("gone.py", None, "is not there"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(
    name: str, text: str | bytes | None, says: str, tmp_path: Path
) -> None:
    """Never a finding of none."""
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says):
        examine_files([tmp_path / name])


def test_our_own_sources_and_programs_are_read_without_a_false_alarm() -> None:
    """Every program that the user tests run, and the example: they keep their promises."""
    root = Path(__file__).parents[2]
    files = [*(root / "tests" / "user" / "programs").rglob("*.py"), *(root / "examples").glob("*.py")]
    found = [one for file in files for one in examine_files([file]) if one.rule.severity != "note"]
    assert found == []


def test_a_program_of_one_name_set_twice_is_not_guessed_at(tmp_path: Path) -> None:
    """What is set in two places is unknown, and unknown is no finding."""
    program = dedent(
        """
        from confluent_kafka import Producer
        import uuid
        me = str(uuid.uuid4())
        if stable:
            me = "orders-0"
        conf = {"transactional.id": me}
        Producer(conf)
        """
    )
    assert rules_in(tmp_path, program) == []
