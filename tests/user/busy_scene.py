"""One user's day: a broker, topics that are being written to, a program that is stopped and started again.

The programs are whole scripts in `programs/`. They run as their own processes, in an empty folder, and know nothing of
the tests. What they have written is counted by confluent-kafka, never by Semel.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

import semel
from semel.processes import spawn

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
PATIENCE_S = 240.0
"""How long a step may take on a busy machine before it counts as stuck."""
ENOUGH = 150
"""So many new results in a run are progress."""

_STARVED = "Python worker failed to connect back"
"""Spark gives a new Python worker ten seconds, which no setting changes. On a machine with too much else to do that is
not enough, and the query fails. Its user would start it again."""
_STARVED_STARTS_MAX = 2

_LOOK_S = 0.5
"""How long to leave the processor to the programs between two looks at their results."""

Results = Callable[[], Sequence[Hashable]]
Stop = Literal["terminate", "interrupt", "kill"]
"""SIGTERM to the program; Ctrl-C in its terminal; kill -9 for it and all that it has started."""

# In spark-defaults.conf, so that the programs need no settings for tests. They live for seconds: what compiles and
# shows pages would outweigh what is done.
SPARK_DEFAULTS = """\
spark.master local[2]
spark.ui.enabled false
spark.ui.showConsoleProgress false
spark.sql.shuffle.partitions 2
spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.sql.codegen.wholeStage false
spark.sql.codegen.factoryMode NO_CODEGEN
"""


class Record(NamedTuple):
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int

    @property
    def order(self) -> dict[str, Any]:
        return json.loads(self.value)


class Running:
    """A program's process and what it has said."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path) -> None:
        self.command, self.log = command, log
        self._folder = folder
        self._starved_starts = 0
        self._log_start = log.stat().st_size if log.exists() else 0
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        return spawn(_in_an_activated_environment(self.command, self._folder), folder=self._folder, output=self.log)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None or self._starts_again()

    def _starts_again(self) -> bool:
        """Start it again if the machine was too busy for Spark, as its supervisor would."""
        has_failed = (self._process.returncode or 0) > 0
        if not has_failed or self._starved_starts == _STARVED_STARTS_MAX or _STARVED not in self.said:
            return False
        self.end()  # what it has left behind
        self._starved_starts += 1
        print(f"{self.command} is started again: {_STARVED}")
        self._log_start = self.log.stat().st_size
        self._process = self._spawn()
        return True

    @property
    def said(self) -> str:
        """Its output since this start."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def stop(self, how: Stop) -> None:
        """Stop it as its user would, and wait until it is gone."""
        if how == "terminate":
            self._process.terminate()
        else:
            os.killpg(self._process.pid, signal.SIGKILL if how == "kill" else signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"{self.command} did not end within 60 s of {how}:\n{self.said[-4000:]}") from None

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for it to end by itself; its exit status."""
        try:
            status = self._process.wait(timeout_s)
            return self.wait(timeout_s) if self._starts_again() else status
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.command} still ran after {timeout_s} s:\n{self.said[-4000:]}") from None

    def end(self) -> None:
        """Leave nothing of it behind."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait()


class Finishes(Protocol):
    """What keeps topics busy."""

    def finish(self) -> None:
        """Stop writing. From here on the input is complete."""
        ...


class Writer:
    """The process that keeps the topics busy."""

    def __init__(self, process: Running) -> None:
        self._process = process

    def finish(self) -> None:
        """Stop writing. From here on the input is complete."""
        assert self._process.is_alive, f"the writer has ended early:\n{self._process.said}"
        self._process.stop("terminate")
        assert "wrote" in self._process.said, self._process.said


class Scene:
    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.folder = folder / "home"
        """Where the programs run, and so where their relative paths lead."""
        self.folder.mkdir()
        self._logs = folder
        self._started: list[Running] = []

    def close(self) -> None:
        for process in self._started:
            process.end()

    # -- who is there ----------------------------------------------------------------------------------------------

    def create(self, *topics: str, partitions: int = 2, config: dict[str, str] | None = None) -> None:
        with semel.Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.create_topics(*topics, partitions=partitions, config=config)

    def write(self, *topics: str, rate: int = 200, twice_every: int = 0, broken_every: int = 0) -> Writer:
        """Keep these topics busy; they have a history already when this returns."""
        told = [self.bootstrap, ",".join(topics), str(rate), str(twice_every), str(broken_every)]
        process = self._start([sys.executable, str(HERE / "order_writer.py"), *told], f"writer-of-{topics[0]}")
        self.wait(lambda: sum(self.ends(topics[-1]).values()) >= ENOUGH, "the writer to begin", process)
        return Writer(process)

    def start(self, program: str, *arguments: str) -> Running:
        """Run a script of `programs/` with the broker's address as its first argument."""
        return self._start([sys.executable, str(PROGRAMS / program), self.bootstrap, *arguments], Path(program).stem)

    def produce(self, topic: str, value: bytes) -> None:
        """One more record in each partition."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True})
        for number in self.ends(topic):
            producer.produce(topic, value, partition=number)
        assert producer.flush(30) == 0

    def start_command(self, *command: str) -> Running:
        """Run any command, in the programs' folder."""
        return self._start(command, Path(command[0]).name)

    def _start(self, command: Sequence[str], name: str) -> Running:
        running = Running(command, self.folder, self._logs / f"{name}.log")
        self._started.append(running)
        return running

    def log_of(self, program: str) -> str:
        """What a program has said, over all of its starts."""
        log = self._logs / f"{Path(program).stem}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    # -- what there is ---------------------------------------------------------------------------------------------

    def ends(self, topic: str) -> dict[int, int]:
        """The end of each partition, for readers of committed records."""
        with _Consumer(self.bootstrap) as consumer:
            return _ends(consumer, topic)

    def read(self, topic: str) -> list[Record]:
        """All committed records of a topic, as confluent-kafka reads them; a partition's in their order."""
        found: list[Record] = []
        with _Consumer(self.bootstrap) as consumer:
            # Up to where it ends now: a topic that is being written to never comes to an end by itself.
            ends = _ends(consumer, topic)
            consumer.assign([TopicPartition(topic, number, 0) for number in ends])
            at_end = {number for number, end in ends.items() if not end}
            deadline = time.monotonic() + PATIENCE_S
            while len(at_end) < len(ends):
                assert time.monotonic() < deadline, f"{topic} did not come to an end: {at_end} of {sorted(ends)}"
                for message in consumer.consume(1_000, 0.2):
                    error, number = message.error(), cast(int, message.partition())
                    if error is None and cast(int, message.offset()) < ends[number]:
                        found.append(_record(message))
                    if error is not None and error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    if error is not None or cast(int, message.offset()) >= ends[number] - 1:
                        at_end.add(number)
        return found

    def values(self, topic: str) -> list[bytes]:
        return [record.value for record in self.read(topic)]

    def ids(self, topic: str) -> list[int]:
        """The order numbers in a topic."""
        return [record.order["id"] for record in self.read(topic)]

    # -- what happens ----------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], what: str, *processes: Running) -> None:
        """Wait for it, while these processes run."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for process in processes:
                assert process.is_alive, f"waited for {what}, but {process.command} has ended:\n{process.said[-6000:]}"
            said = "".join(f"\n{process.command}:\n{process.said[-4000:]}" for process in processes)
            assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}{said}"
            time.sleep(_LOOK_S)

    def through_a_restart(
        self,
        writer: Finishes,
        start: Callable[[], Running],
        *,
        stop: Stop,
        found: Results,
        expected: Results,
        before_the_end: Callable[[], None] = lambda: None,
        enough: int = ENOUGH,
        is_progress: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start a program, stop it in the middle of its work, start it again, and judge what it has made.

        `found` is what there is of its results now; `expected` what there must be once the writer has finished. The
        first run is stopped when there are `enough` results and `is_progress` agrees.
        """
        program = start()
        self.wait(lambda: len(found()) >= enough and is_progress(), "the first results", program)
        program.stop(stop)
        there = len(found())
        program = start()
        self.wait(lambda: len(found()) >= there + enough, "results after the restart", program)
        writer.finish()
        before_the_end()
        self.finish(program, stop="terminate", found=found, expected=expected)

    def through_its_own_restart(
        self, writer: Writer, program: Running, *, says: str, found: Results, expected: Results
    ) -> None:
        """The same for a program that stops its query and starts it again by itself, and says so."""
        self.wait(lambda: says in program.said, f"it to say {says!r}", program)
        there = len(found())
        self.wait(lambda: len(found()) >= there + ENOUGH, "results after the restart", program)
        writer.finish()
        self.finish(program, stop="terminate", found=found, expected=expected)

    def finish(
        self,
        program: Running,
        *,
        stop: Stop,
        found: Results,
        expected: Results,
    ) -> None:
        """Let a program finish what is there, stop it, and judge."""
        all_of_it = Counter(expected())
        try:
            self.wait(lambda: Counter(found()) >= all_of_it, "the last results", program)
        except AssertionError:
            assert_exactly(found(), expected())
            raise
        program.stop(stop)
        assert_exactly(found(), expected())


def assert_exactly(found: Iterable[Hashable], expected: Iterable[Hashable]) -> None:
    """Nothing lost, nothing repeated, nothing that does not belong there."""
    have, want = Counter(found), Counter(expected)
    assert want, "nothing was expected, so nothing would have been judged"
    lost, extra = want - have, have - want
    repeated = Counter({item: count for item, count in extra.items() if item in want})
    foreign = extra - repeated
    assert have == want, (
        f"{want.total()} expected, {have.total()} found: {lost.total()} lost, {repeated.total()} repeated, "
        f"{foreign.total()} not expected at all. Lost {_few(lost)}; repeated {_few(repeated)}; foreign {_few(foreign)}"
    )


def since_a_latest_start(found: Sequence[int], orders: Sequence[Record], ends_before: dict[int, int]) -> list[int]:
    """What a reader must have found that began at the end of a busy topic, after these ends were seen.

    It may begin anywhere after them, and must then have everything of that partition.
    """
    place = {record.order["id"]: (record.partition, record.offset) for record in orders}
    begin: dict[int, int] = {}
    for number in found:
        partition, offset = place[number]
        begin[partition] = min(offset, begin.get(partition, offset))
    for partition, offset in begin.items():
        assert offset >= ends_before[partition], (
            f"partition {partition} was read from offset {offset}, though it ended at {ends_before[partition]} before "
            "the program was started for the first time"
        )
    nowhere = max(record.offset for record in orders) + 1
    return [record.order["id"] for record in orders if record.offset >= begin.get(record.partition, nowhere)]


def spark_files(folder: Path) -> list[Path]:
    """The files that a streaming query has committed to a folder, in Spark's own list of them."""
    metadata = folder / "_spark_metadata"
    named: set[Path] = set()
    for log in metadata.glob("*") if metadata.exists() else ():
        if not log.name.startswith("."):
            for line in log.read_text().splitlines()[1:]:
                named.add(folder / Path(json.loads(line)["path"].removeprefix("file://")).name)
    return sorted(named)


def _ends(consumer: Consumer, topic: str) -> dict[int, int]:
    ends: dict[int, int] = {}
    for number in consumer.list_topics(topic, timeout=30).topics[topic].partitions:
        ends[number] = cast(tuple[int, int], consumer.get_watermark_offsets(TopicPartition(topic, number), 30))[1]
    return ends


def _record(message: Message) -> Record:
    headers = tuple(cast(list[tuple[str, bytes | None]], message.headers() or []))
    return Record(
        cast(int, message.partition()),
        cast(int, message.offset()),
        cast("bytes | None", message.key()),
        cast(bytes, message.value()),
        headers,
        message.timestamp()[1],
    )


class _Consumer:
    """A consumer of committed records that is closed in the end."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "the-judge",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,
            }
        )

    def __enter__(self) -> Consumer:
        return self._consumer

    def __exit__(self, *_: object) -> None:
        self._consumer.close()


def _few(items: Counter[Hashable]) -> list[Hashable]:
    return sorted(items.elements(), key=str)[:5]


def _in_an_activated_environment(command: Sequence[str], folder: Path) -> list[str]:
    """The command as a user runs it: outside of the repository, in an activated virtual environment."""
    conf = folder.parent / "conf"
    if not conf.exists():
        conf.mkdir()
        (conf / "spark-defaults.conf").write_text(SPARK_DEFAULTS)
    settings = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "SPARK_CONF_DIR": str(conf),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }
    env = shutil.which("env")
    assert env is not None
    return [env, "-u", "PYTHONPATH", *(f"{name}={value}" for name, value in settings.items()), *command]
