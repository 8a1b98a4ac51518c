"""Every program that `semel advise` prints, run as it is: restarted in the middle of a busy topic, and counted."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import confluent_kafka
import psycopg
import pytest
from busy_scene import Running, Scene, Stop, assert_exactly
from order_writer import order

import semel
from semel.advise.program import Names, Program
from semel.advise.questions import QUESTIONS
from semel.advise.recommend import recommend
from semel.testing.postgres import Postgres

pytestmark = pytest.mark.user

Rows = list[tuple[int, str]]


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    """One broker for all: each test has names of its own, and there are many."""
    with semel.Broker() as broker:
        yield broker.bootstrap


@pytest.fixture
def scene(bootstrap: str, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(bootstrap, tmp_path)
    try:
        yield scene
    finally:
        scene.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture
def address(request: pytest.FixtureRequest, server: Postgres) -> str:
    """A database of the test's own."""
    name = f"advised_{abs(hash(request.node.name))}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return server.uri.replace("/postgres?", f"/{name}?")


class Feeder(threading.Thread):
    """Keeps a topic busy, by another client than Semel."""

    def __init__(self, bootstrap: str, topic: str, rate: int) -> None:
        super().__init__(daemon=True)
        self._producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
        self._topic, self._rate = topic, rate
        self._is_over = threading.Event()
        self.start()

    def run(self) -> None:
        number = 0
        while not self._is_over.wait(0.1):
            for _ in range(max(1, self._rate // 10)):
                self._producer.produce(self._topic, order(number, 0), key=f"customer-{number % 7}")
                number += 1
            self._producer.poll(0)

    def finish(self) -> None:
        """Stop writing. From here on the input is complete."""
        self._is_over.set()
        self.join()
        assert self._producer.flush(60) == 0


class Advised:
    """Programs for some answers, written to a folder as a user does it, with topics and a name of their own."""

    def __init__(self, scene: Scene, names: dict[str, str] | None = None, **answers: Any) -> None:
        self.scene = scene
        own = uuid.uuid4().hex[:8]
        self.names = Names(
            name=f"pipeline-{own}",
            bootstrap=scene.bootstrap,
            input=f"orders-{own}",
            output=f"results-{own}",
            **(names or {}),
        )
        self.advice = recommend(names=self.names, **answers)
        for program in self.advice.programs:
            (scene.folder / program.file).write_text(program.text)

    @property
    def kinds(self) -> list[str]:
        return [program.kind for program in self.advice.programs]

    def create(self) -> None:
        """The topics that the advice names."""
        topics = {topic for program in self.advice.programs for topic in program.topics}
        self.scene.create(*sorted(topics))

    def feed(self, rate: int = 200) -> Feeder:
        feeder = Feeder(self.scene.bootstrap, self.names.input, rate)
        self.scene.wait(lambda: len(self.orders()) > 0, "the first orders")
        return feeder

    def orders(self) -> list[bytes]:
        return self.scene.values(self.names.input)

    def results(self) -> list[bytes]:
        return self.scene.values(self.names.output)

    def start(self, file: str, *arguments: str, **environment: str) -> Running:
        given = [f"{name}={value}" for name, value in environment.items()]
        return self.scene.start_command("/usr/bin/env", *given, sys.executable, file, *arguments)


def advised(scene: Scene, *kinds: str, names: dict[str, str] | None = None, **answers: Any) -> Advised:
    found = Advised(scene, names, **answers)
    assert found.kinds == list(kinds)
    return found


def once(values: Sequence[Hashable]) -> list[Hashable]:
    """Without repeats, for at-least-once."""
    return list(set(values))


def through_at_most_once(plan: Advised, start: Callable[[], Running], found: Callable[[], Sequence[Hashable]]) -> None:
    """Nothing twice and nothing foreign; what came during the restart may be lost."""
    scene, writer = plan.scene, plan.feed()
    program = start()
    scene.wait(lambda: len(found()) >= 100, "the first results", program)
    program.stop("terminate")
    there = len(found())
    program = start()
    scene.wait(lambda: len(found()) >= there + 50, "results after the restart", program)
    writer.finish()
    program.stop("terminate")
    counts = Counter(found())
    assert max(counts.values()) == 1


# -- from topic to topic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deployment", "environment"),
    [("single", {}), ("indexed", {"INSTANCE": "3"}), ("statefulset", {"HOSTNAME": "orders-pipeline-1"})],
)
def test_a_topic_is_copied_exactly_once(scene: Scene, deployment: str, environment: dict[str, str]) -> None:
    """Killed with kill -9, for each way to name an instance."""
    plan = advised(scene, f"kafka_exactly_once/{deployment}", deployment=deployment)
    plan.create()
    scene.through_a_restart(
        plan.feed(),
        lambda: plan.start("pipeline.py", **environment),
        stop="kill",
        found=lambda: plan.results(),
        expected=lambda: [value.upper() for value in plan.orders()],
    )


def test_a_pod_without_a_stable_name_is_refused(scene: Scene) -> None:
    """A Deployment's pods get new names, and so would the transactional.id."""
    plan = advised(scene, "kafka_exactly_once/statefulset", deployment="statefulset")
    program = plan.start("pipeline.py", HOSTNAME="orders-pipeline-7d4b9c-x2x7q")
    assert program.wait() == 1
    assert "is no pod of a StatefulSet" in program.said


@pytest.mark.parametrize("stop", ["kill", "terminate"])
def test_a_topic_is_copied_at_least_once(scene: Scene, stop: Stop) -> None:
    """Nothing is lost."""
    plan = advised(scene, "kafka_at_least_once", duplicates="harmless")
    plan.create()
    scene.through_a_restart(
        plan.feed(),
        lambda: plan.start("pipeline.py"),
        stop=stop,
        found=lambda: once(plan.results()),
        expected=lambda: [value.upper() for value in plan.orders()],
    )


def test_a_topic_is_copied_at_most_once(scene: Scene) -> None:
    """Nothing is repeated."""
    plan = advised(scene, "kafka_at_most_once", loss="yes")
    plan.create()
    through_at_most_once(plan, lambda: plan.start("pipeline.py"), lambda: plan.results())
    assert set(plan.results()) <= {value.upper() for value in plan.orders()}


# -- from a file into a topic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deployment", "environment"),
    [("single", {}), ("indexed", {"INSTANCE": "3"}), ("statefulset", {"HOSTNAME": "orders-pipeline-1"})],
)
def test_a_file_is_sent_exactly_once(scene: Scene, deployment: str, environment: dict[str, str]) -> None:
    """Killed in the middle; the next run goes on where the last one had committed, and a third sends nothing."""
    plan = advised(scene, f"producer_exactly_once/{deployment}", source="program", deployment=deployment)
    plan.create()
    lines = [b"line %d" % number for number in range(200_000)]
    (scene.folder / "records.txt").write_bytes(b"\n".join(lines) + b"\n")
    program = plan.start("producer.py", **environment)
    scene.wait(lambda: sum(scene.ends(plan.names.output).values()) > 0, "the first lines", program)
    program.stop("kill")
    for _ in range(2):
        program = plan.start("producer.py", **environment)
        assert program.wait() == 0, program.said
        assert "200000 lines are committed." in program.said
    assert_exactly(plan.results(), lines)


def test_a_file_is_sent_at_least_once(scene: Scene) -> None:
    """Once by one run, and all of it again by the next."""
    plan = advised(scene, "producer_at_least_once", source="program", together="no")
    plan.create()
    lines = [b"line %d" % number for number in range(10_000)]
    (scene.folder / "records.txt").write_bytes(b"\n".join(lines) + b"\n")
    for number in (1, 2):
        program = plan.start("producer.py")
        assert program.wait() == 0, program.said
        assert_exactly(plan.results(), lines * number)


def test_a_file_is_sent_at_most_once(scene: Scene) -> None:
    """Nothing twice; on a sound broker most arrives."""
    plan = advised(scene, "producer_at_most_once", source="program", loss="yes")
    plan.create()
    lines = [b"line %d" % number for number in range(10_000)]
    (scene.folder / "records.txt").write_bytes(b"\n".join(lines) + b"\n")
    program = plan.start("producer.py")
    assert program.wait() == 0, program.said
    counts = Counter(plan.results())
    assert counts
    assert max(counts.values()) == 1
    assert counts.keys() <= set(lines)


# -- into a table ----------------------------------------------------------------------------------------------


def rows_of(scene: Scene, target: str, address: str, table: str = "results") -> Rows:
    """All rows of the table, or none while it is not there."""
    query = f"SELECT id, product FROM {table}"
    if target == "postgres":
        with psycopg.connect(address) as connection:
            if connection.execute("SELECT to_regclass(%s)", (table,)).fetchone() == (None,):
                return []
            return [(number, product) for number, product in connection.execute(query.encode())]
    if not (scene.folder / "shop.db").exists():
        return []
    database = sqlite3.connect(scene.folder / "shop.db", timeout=30)
    try:
        return database.execute(query).fetchall()
    except sqlite3.OperationalError:  # the program has not made its table yet
        return []
    finally:
        database.close()


def orders_of(plan: Advised) -> Rows:
    return [(record.order["id"], record.order["product"]) for record in plan.scene.read(plan.names.input)]


TABLES = [(target, writes) for target in ("sqlite", "postgres") for writes in ("replace", "add")]


@pytest.mark.parametrize(("target", "writes"), TABLES)
def test_a_table_is_filled_exactly_once(scene: Scene, target: str, writes: str, address: str) -> None:
    """Killed with kill -9."""
    kind = f"table_exactly_once/{target}-{writes}"
    plan = advised(scene, kind, names={"postgres": address}, target=target, writes=writes)
    plan.create()
    scene.through_a_restart(
        plan.feed(),
        lambda: plan.start("pipeline.py"),
        stop="kill",
        found=lambda: rows_of(scene, target, address),
        expected=lambda: orders_of(plan),
    )


@pytest.mark.parametrize(("target", "writes"), TABLES)
def test_a_table_is_filled_at_least_once(scene: Scene, target: str, writes: str, address: str) -> None:
    """Nothing is lost; where rows are replaced by their key, nothing is repeated either."""
    kind = f"table_at_least_once/{target}-{writes}"
    plan = advised(
        scene, kind, names={"postgres": address}, target=target, writes=writes, duplicates="harmless"
    )  # fmt: skip
    plan.create()
    scene.through_a_restart(
        plan.feed(),
        lambda: plan.start("pipeline.py"),
        stop="terminate",
        found=lambda: once(rows_of(scene, target, address)) if writes == "add" else rows_of(scene, target, address),
        expected=lambda: orders_of(plan),
    )


@pytest.mark.parametrize(("target", "writes"), TABLES)
def test_a_table_is_filled_at_most_once(scene: Scene, target: str, writes: str, address: str) -> None:
    """Nothing is repeated."""
    kind = f"table_at_most_once/{target}-{writes}"
    plan = advised(scene, kind, names={"postgres": address}, target=target, writes=writes, loss="yes")
    plan.create()
    through_at_most_once(plan, lambda: plan.start("pipeline.py"), lambda: rows_of(scene, target, address))
    assert set(rows_of(scene, target, address)) <= set(orders_of(plan))


# -- calls -----------------------------------------------------------------------------------------------------


class Callee:
    """An HTTP server that carries a call out once for each idempotency key, if it has one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | None, bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.calls.append((self.headers["Idempotency-Key"], body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def bodies(self) -> list[bytes]:
        return [body for _, body in self.calls]

    def carried_out(self) -> list[bytes]:
        """Calls with one key count once."""
        return list(dict(self.calls).values())


@pytest.fixture
def callee() -> Iterator[Callee]:
    callee = Callee()
    yield callee
    callee.server.shutdown()
    callee.server.server_close()


def test_calls_with_a_key_are_carried_out_once(scene: Scene, callee: Callee) -> None:
    """Killed with kill -9."""
    plan = advised(scene, "calls_claimed/with-key", names={"url": callee.url}, target="calls", takes_key="yes")
    plan.create()
    # Calls that were under way are taken over when their lease is over.
    text = (scene.folder / "calls.py").read_text()
    (scene.folder / "calls.py").write_text(text.replace("lease_s=60", "lease_s=4").replace("timeout=30", "timeout=2"))
    scene.through_a_restart(
        plan.feed(40),
        lambda: plan.start("calls.py"),
        stop="kill",
        found=callee.carried_out,
        expected=lambda: plan.orders(),
        enough=50,
    )


def test_calls_without_a_key_are_made_once_at_most(scene: Scene, callee: Callee) -> None:
    """A clean stop leaves none in doubt."""
    plan = advised(scene, "calls_claimed/without-key", names={"url": callee.url}, target="calls")
    plan.create()
    scene.through_a_restart(
        plan.feed(40),
        lambda: plan.start("calls.py"),
        stop="terminate",
        found=callee.bodies,
        expected=lambda: plan.orders(),
        enough=50,
    )


def test_calls_are_made_at_least_once(scene: Scene, callee: Callee) -> None:
    """Nothing is lost."""
    plan = advised(scene, "calls_at_least_once", names={"url": callee.url}, target="calls", duplicates="harmless")
    plan.create()
    scene.through_a_restart(
        plan.feed(40),
        lambda: plan.start("calls.py"),
        stop="terminate",
        found=lambda: once(callee.bodies()),
        expected=lambda: plan.orders(),
        enough=50,
    )


def test_calls_are_made_at_most_once(scene: Scene, callee: Callee) -> None:
    """Nothing is repeated."""
    plan = advised(scene, "calls_at_most_once", names={"url": callee.url}, target="calls", loss="yes")
    plan.create()
    through_at_most_once(plan, lambda: plan.start("calls.py"), callee.bodies)
    assert set(callee.bodies()) <= set(plan.orders())


# -- from a database -------------------------------------------------------------------------------------------


def shop_rows(scene: Scene, database: str, address: str) -> Rows:
    query = "SELECT id, item FROM shop_orders"
    if database == "postgres":
        with psycopg.connect(address) as connection:
            return [(number, item) for number, item in connection.execute(query.encode())]
    connection = sqlite3.connect(scene.folder / "shop.db", timeout=30)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def events(plan: Advised) -> Rows:
    found = [json.loads(value) for value in plan.results()]
    return [(event["id"], event["item"]) for event in found]


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_orders_reach_kafka_once_by_the_outbox(scene: Scene, database: str, address: str) -> None:
    """The relay is killed while the service goes on."""
    names = {"postgres": address, "table": "shop_orders"}
    kinds = (f"outbox_service/{database}", f"outbox_relay/{database}")
    plan = advised(scene, *kinds, names=names, source="database", database=database)
    plan.create()
    relay: Running | None = None
    for turn in range(3):
        items = [f"item-{turn}-{number}" for number in range(200)]
        service = plan.start("service.py", *items)
        assert service.wait() == 0, service.said
        if relay is not None:
            relay.stop("kill")
        relay = plan.start("relay.py")
        scene.wait(lambda turn=turn: len(events(plan)) >= 200 * (turn + 1), "the events", relay)
    assert relay is not None
    relay.stop("terminate")
    assert_exactly(events(plan), shop_rows(scene, database, address))


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_events_after_the_commit_are_never_of_orders_that_are_not_there(
    scene: Scene, database: str, address: str
) -> None:
    """At most once: an event may be lost in a crash, and none is invented or repeated."""
    names = {"postgres": address, "table": "shop_orders"}
    plan = advised(
        scene, f"after_commit/{database}", names=names, source="database", database=database, loss="yes"
    )  # fmt: skip
    plan.create()
    for turn in range(2):
        service = plan.start("service.py", *(f"item-{turn}-{number}" for number in range(50)))
        assert service.wait() == 0, service.said
    assert_exactly(events(plan), shop_rows(scene, database, address))


# -- Spark -----------------------------------------------------------------------------------------------------


def test_spark_copies_a_topic_exactly_once(scene: Scene) -> None:
    """Killed with kill -9, with everything it has started."""
    plan = advised(scene, "spark_stream", platform="spark")
    plan.create()
    scene.through_a_restart(
        plan.feed(),
        lambda: plan.start("job.py"),
        stop="kill",
        found=lambda: plan.results(),
        expected=lambda: [value.upper() for value in plan.orders()],
    )


@pytest.mark.parametrize(("target", "writes"), TABLES)
def test_spark_fills_a_table_exactly_once(scene: Scene, target: str, writes: str, address: str) -> None:
    """Stopped and started again."""
    kind = f"spark_stream_table/{target}-{writes}"
    plan = advised(
        scene, kind, names={"postgres": address}, platform="spark", target=target, writes=writes
    )  # fmt: skip
    plan.create()
    scene.through_a_restart(
        plan.feed(),
        lambda: plan.start("job.py"),
        stop="terminate",
        found=lambda: rows_of(scene, target, address),
        expected=lambda: orders_of(plan),
    )


def test_a_spark_job_that_is_run_twice_writes_once(scene: Scene) -> None:
    """The second run says so."""
    plan = advised(scene, "spark_job", platform="spark", source="program")
    plan.create()
    lines = [b"line %d" % number for number in range(1_000)]
    (scene.folder / "records.txt").write_bytes(b"\n".join(lines) + b"\n")
    for said in ("1000 records written", "written before"):
        job = plan.start("job.py", "2026-11-15")
        assert job.wait() == 0, job.said
        assert said in job.said
        assert_exactly(plan.results(), lines)


@pytest.mark.parametrize(("target", "writes"), TABLES)
def test_a_spark_job_fills_a_table_once(scene: Scene, target: str, writes: str, address: str) -> None:
    """Each line is a row."""
    kind = f"spark_job_table/{target}-{writes}"
    names = {"postgres": address}
    plan = advised(scene, kind, names=names, platform="spark", source="program", target=target, writes=writes)
    rows = [(number, f"tea-{number}") for number in range(500)]
    text = "".join(json.dumps({"id": number, "product": product}) + "\n" for number, product in rows)
    (scene.folder / "records.txt").write_text(text)
    job = plan.start("job.py", "2026-11-15")
    assert job.wait() == 0, job.said
    assert_exactly(rows_of(scene, target, address), rows)


# -- all of them -----------------------------------------------------------------------------------------------


def test_every_program_that_can_be_printed_has_a_test_here() -> None:
    """By the text of this file, so that it holds in a run of some tests as well."""
    from itertools import product

    from semel.advise.questions import Answers
    from semel.errors import ConfigError

    kinds: set[str] = set()
    choices = [question for question in QUESTIONS if question.choices]
    for values in product(*(question.choices for question in choices)):
        given: dict[str, Any] = dict(zip((question.name for question in choices), values, strict=True))
        try:
            programs: tuple[Program, ...] = recommend(Answers(**given)).programs
        except ConfigError:
            continue
        kinds.update(program.kind for program in programs)
    here = Path(__file__).read_text()
    for kind in kinds:
        template, _, variant = kind.partition("/")
        assert f'"{kind}"' in here or f'f"{template}/{{' in here, kind
        assert not variant or all(part in here for part in variant.split("-")), kind
