"""Semel as users get it: a wheel, installed with each extra into an empty environment, far from the repository.

Every example of README and docs runs there, and the programs in examples/. `make installs` runs this.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pytest
from doc_examples import PAGES, ROOT, SETUPS, Example, all_examples, commands

import semel
from semel.testing.postgres import Postgres

pytestmark = pytest.mark.install

HERE = Path(__file__).parent
EXTRAS_OF_PAGES = {
    "docs/capture.md": "postgres",
    "docs/databases.md": "spark,postgres",
    "docs/moving.md": "spark",
    "docs/session.md": "postgres",
    "docs/spark.md": "spark",
    "docs/spark-source.md": "spark",
    "docs/watching.md": "otel",
}
"""All other pages need Semel alone."""
PROGRAMS = [one for one in all_examples("python") if not one.is_test and not one.is_step]
WITH_PYTHON = [page for page in PAGES if any(one.page == page for one in PROGRAMS)]
WIDE = {"TERM": "dumb", "COLUMNS": "200"}
VERSIONS = ("3.11", "3.12", "3.13", "3.14")


class Environment:
    """A virtual environment with the wheel in it. Its programs run in a folder of their own, with its `bin` first on
    the PATH, as in an activated one."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.work = folder / "work"
        self.work.mkdir()
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "VIRTUAL"))
        }
        self.variables = {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(
        self,
        *command: str,
        given: str = "",
        timeout: float = 240,
        variables: Mapping[str, str] = MappingProxyType({}),
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=folder or self.work,
            env={**self.variables, **variables},
        )


class Installer:
    """Builds sdist and wheel once, and makes an environment for each set of extras when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, ...], Environment] = {}
        found = shutil.which("uv", path=f"{os.environ['PATH']}:{ROOT / '.tools' / 'bin'}")
        assert found is not None, "uv is missing: `make setup` puts it into .tools"
        self._uv = found
        # The wheel is built of the sdist, as where no wheel fits: the repository's own compiled kernel stays as it is.
        self._do("build", "--out-dir", str(folder), str(ROOT))
        (self.wheel,) = folder.glob("semel-*.whl")
        (self.sdist,) = folder.glob("semel-*.tar.gz")

    def environment(self, extras: str = "", *also: str, python: str = sys.executable) -> Environment:
        key = (extras, python, *also)
        if key not in self._made:
            folder = self._folder / f"environment-{len(self._made)}"
            self._do("venv", "--no-python-downloads", "--python", python, str(folder))
            wheel = f"semel[{extras}] @ {self.wheel.as_uri()}" if extras else str(self.wheel)
            self._do("pip", "install", "--python", str(folder / "bin" / "python"), wheel, *also)
            self._made[key] = Environment(folder)
        return self._made[key]

    def build_of_sdist(self, folder: Path, variables: Mapping[str, str]) -> Path:
        """A wheel that is built of the sdist with these variables."""
        self._do("build", "--wheel", "--out-dir", str(folder), str(self.sdist), variables=variables)
        (wheel,) = folder.glob("semel-*.whl")
        return wheel

    def _do(self, *arguments: str, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        done = subprocess.run(
            [self._uv, "-q", *arguments],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env={**os.environ, **variables},
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def installer(tmp_path_factory: pytest.TempPathFactory) -> Installer:
    return Installer(tmp_path_factory.mktemp("installs"))


@pytest.fixture
def postgres_variables() -> Iterator[dict[str, str]]:
    with Postgres(settings={"wal_level": "logical"}) as postgres:
        yield {"PGHOST": str(postgres.folder), "PGUSER": "postgres"}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_examples_of_a_page_run(
    page: Path, installer: Installer, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """What a reader copies works with the extra that the page is about, and nothing else."""
    extras = EXTRAS_OF_PAGES.get(str(page.relative_to(ROOT)), "")
    variables = request.getfixturevalue("postgres_variables") if "postgres" in extras else {}
    wanted = [one for one in PROGRAMS if one.page == page]
    run_examples(wanted, installer.environment(extras), tmp_path, variables)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Spark 3.5 knows no newer Python than 3.11")
def test_the_extra_for_spark_3_5_is_complete(installer: Installer, tmp_path: Path) -> None:
    """pip alone would choose a pyarrow that cannot be imported beside the NumPy that this Spark asks for."""
    wanted = [one for one in all_examples("python") if one.setup is not None and one.setup.stem == "spark_batch.py"]
    run_examples(wanted, installer.environment("spark35"), tmp_path)


def run_examples(
    wanted: Sequence[Example],
    environment: Environment,
    folder: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    plan = [
        {
            "name": one.name,
            "code": one.code,
            "setup": one.setup.read_text() if one.setup else None,
            "continues": one.continues,
        }
        for one in wanted
    ]
    runner = shutil.copy(HERE / "example_runner.py", folder)
    # Pages share names of files, such as shop.db: each runs in a folder of its own.
    done = environment.run("python", str(runner), given=json.dumps(plan), variables=variables, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert re.findall(r"^ran (.*)$", done.stdout, re.MULTILINE) == [one.name for one in wanted]
    assert wanted


@pytest.mark.parametrize(
    "example", [one for one in all_examples("python") if one.is_test], ids=lambda example: example.name
)
def test_examples_that_are_tests_pass(example: Example, installer: Installer, tmp_path: Path) -> None:
    """The pytest plugin comes with the wheel."""
    file = tmp_path / "test_example.py"
    file.write_text(example.code)
    done = installer.environment("clients", "pytest").run("python", "-m", "pytest", "-q", str(file))
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.parametrize(
    "example", [one for one in all_examples("sh") if not one.is_step], ids=lambda example: example.name
)
def test_the_commands_of_a_page_run(example: Example, installer: Installer, tmp_path: Path) -> None:
    """`semel verify` and `semel guarantees` get a second, so that they prove nothing, but end with a report."""
    environment = installer.environment("clients")
    if example.setup is not None:
        done = environment.run("python", "-c", example.setup.read_text())
        assert done.returncode == 0, done.stderr
    for words in commands(example):
        if words[:2] == ["semel", "broker"]:
            run_broker(environment, words, tmp_path)
        elif words[:2] == ["semel", "relay"]:
            continue  # tests/bridges/relay/test_relay_guide.py runs it, with a database and rows
        elif words[:2] == ["semel", "capture"]:
            continue  # so does tests/bridges/capture/test_capture_guide.py
        elif words[:2] == ["semel", "mirror"]:
            run_mirror(environment, words, tmp_path)
        elif words[:2] in (["semel", "advise"], ["semel", "doctor"]):
            run_advice(environment, words)
        elif words[:2] == ["semel", "metrics"]:
            done = environment.run("semel", *words[1:], variables=WIDE)
            assert done.returncode == 0, done.stderr
            assert "semel_sink_" in done.stdout
        elif words[0] == "semel":
            arguments = words[1:]
            if words[1] in ("verify", "guarantees"):
                arguments += ["--time", "1s"]
            done = environment.run("semel", *arguments, variables=WIDE)
            assert "Report:" in done.stdout, done.stdout + done.stderr
            assert "Traceback" not in done.stderr


def run_advice(environment: Environment, words: Sequence[str]) -> None:
    """Exactly as it is written, on a broker of its own where it names one."""
    with semel.Broker(config={"offsets.retention.minutes": 30_000}) as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("orders")
        arguments = [word.replace("localhost:9092", broker.bootstrap) for word in words[1:]]
        done = environment.run("semel", *arguments, variables=WIDE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


def run_mirror(environment: Environment, words: Sequence[str], folder: Path) -> None:
    """Between two brokers of its own, with the page's file of routes, until nothing is left to copy."""
    (routes,) = (one.code for one in all_examples("toml"))
    with semel.Broker() as source, semel.Broker() as target:
        with semel.Admin({"bootstrap.servers": source.bootstrap}) as admin:
            admin.create_topics("orders", "items", "payments.eu")

        def placed(text: str) -> str:
            return text.replace("127.0.0.1:9092", source.bootstrap).replace("127.0.0.1:9192", target.bootstrap)

        (folder / "routes.toml").write_text(placed(routes))
        done = environment.run("semel", *map(placed, words[1:]), "--idle-ms", "500", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "semel mirror ready" in done.stdout
    assert "west: 0 records" in done.stdout


def run_broker(environment: Environment, words: Sequence[str], folder: Path) -> None:
    """Start it on a free port, wait for the line that says where it is, and stop it."""
    arguments = [re.sub(r"^9092$", "0", word) for word in words[1:]]
    process = subprocess.Popen(
        [str(environment.bin / "semel"), *arguments], cwd=folder, env=environment.variables, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert re.search(rb"ready on 127\.0\.0\.1:\d+", process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_page_comes_with_its_extra(installer: Installer) -> None:
    """With its templates and its style; without the extra one line says what is missing."""
    done = installer.environment().run("semel", "ui", "--bootstrap", "127.0.0.1:1")
    assert (done.returncode, "pip install 'semel[ui]'" in done.stderr) == (1, True)
    environment = installer.environment("ui")
    with semel.Broker() as broker:
        process = subprocess.Popen(
            [str(environment.bin / "semel"), "ui", "--port", "0", "--bootstrap", broker.bootstrap],
            cwd=environment.work,
            env=environment.variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            for path, said in (
                ("", "Overview"),
                ("static/semel.css", "color-scheme"),
                ("static/semel.js", "use strict"),
            ):
                with urllib.request.urlopen(url + path, timeout=60) as answer:
                    assert said in answer.read().decode()
        finally:
            process.kill()
            process.communicate()


def test_the_programs_in_examples_run(installer: Installer, tmp_path: Path) -> None:
    """Two instances of the processor share the work, and every message is there once with "-ok" behind it."""
    (program,) = (ROOT / "examples").glob("*.py")
    environment = installer.environment()
    values = [b"message %d" % n for n in range(1000)]
    with semel.Broker() as broker:
        to = {"bootstrap.servers": broker.bootstrap}
        with semel.Admin(to) as admin, semel.Producer(to) as producer:
            admin.create_topics("input", "output", partitions=4)
            producer.send_table("input", pa.table({"value": values}))
        running = [
            subprocess.Popen(
                [str(environment.bin / "python"), str(program), broker.bootstrap, "input", "output", instance],
                cwd=tmp_path,
                env=environment.variables,
            )
            for instance in ("a", "b")
        ]
        try:
            until = time.monotonic() + 90
            while len(written := read(broker.bootstrap, "output", 4)) < len(values) and time.monotonic() < until:
                assert [process.poll() for process in running] == [None, None]
                time.sleep(0.1)
        finally:
            for process in running:
                process.kill()
                process.wait()
        assert sorted(written) == sorted(value + b"-ok" for value in values)


def read(bootstrap: str, topic: str, partitions: int) -> list[bytes]:
    with semel.Fetcher({"bootstrap.servers": bootstrap}) as fetcher:
        fetcher.assign({(topic, partition): "earliest" for partition in range(partitions)})
        return [
            value for table in fetcher.read_until(fetcher.end_offsets()) for value in table.column("value").to_pylist()
        ]


CONNECT = """
import sys, semel
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote("local[2]").getOrCreate()
df = spark.createDataFrame([("a", "tea"), ("b", "milk")], "key STRING, value STRING")
done = semel.write_batch(df, name="through-connect", job_id="1", bootstrap=sys.argv[1], topic="out")
assert not done.skipped
spark.stop()
"""


def test_the_spark_connect_extra_is_complete(installer: Installer) -> None:
    """A batch is written through Spark Connect, which needs more packages than Spark itself."""
    with semel.Broker() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("out")
        done = installer.environment("spark-connect").run("python", "-c", CONNECT, broker.bootstrap)
        assert done.returncode == 0, done.stderr[-4000:]
        assert sorted(read(broker.bootstrap, "out", 1)) == [b"milk", b"tea"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["demo"], "pyspark 4.2 or newer is missing. Install it: pip install 'semel[spark]'"),
        (["bench", "spark"], "pyspark 4.2 or newer is missing."),
        (["bench", "session"], "confluent-kafka is missing. Install it: pip install 'semel[clients]'"),
        (["verify", "--client", "aiokafka"], "aiokafka is missing. Install it: pip install aiokafka"),
        (["guarantees", "--client", "kafka-python"], "kafka-python is missing. Install it: pip install kafka-python"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_without_extras_a_command_says_at_once_which_one_it_needs(
    command: list[str], says: str, installer: Installer
) -> None:
    """In seconds, without a traceback."""
    done = installer.environment().run("semel", *command, timeout=30, variables=WIDE)
    assert done.returncode in (1, 2)
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


IMPORT_ALL = """
import importlib, pkgutil, warnings
warnings.simplefilter("error")
import semel
optional = {"aiokafka", "confluent_kafka", "cryptography", "kafka", "opentelemetry", "psycopg", "pyspark", "pytest"}
optional |= {"jinja2", "markupsafe", "starlette", "uvicorn"}
for module in pkgutil.walk_packages(semel.__path__, "semel."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        if missing.name.partition(".")[0] not in optional:
            raise
for name in semel.__all__:
    getattr(semel, name)
print(semel.__version__)
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_installs_and_imports_on_every_python(version: str, installer: Installer) -> None:
    """Alone, without any extra and without a warning; and README's example runs."""
    found = subprocess.run([ROOT / "scripts" / "find-python.sh", version], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"Python {version} is not installed")
    environment = installer.environment(python=found.stdout.strip())
    done = environment.run("python", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == semel.__version__
    (example,) = [one for one in all_examples("python") if one.page == ROOT / "README.md"]
    done = environment.run("python", "-W", "error", "-c", example.code)
    assert done.returncode == 0, done.stderr


def test_one_wheel_serves_every_python(installer: Installer) -> None:
    """The compiled kernel is in it, for the stable ABI of Python 3.11 and later."""
    assert "-cp311-abi3-" in installer.wheel.name
    assert "semel/records/kernel.abi3.so" in names_in(installer.wheel)


def test_a_build_without_a_c_compiler_takes_one_from_pypi(installer: Installer, tmp_path: Path) -> None:
    """The one that CC names is not there; the kernel is built all the same, and it works."""
    wheel = installer.build_of_sdist(tmp_path, {"CC": "no-such-compiler", "SEMEL_KERNEL": "on"})
    module = "semel/records/kernel.abi3.so"
    with zipfile.ZipFile(wheel) as packed:
        found = Path(packed.extract(module, tmp_path / "unpacked"))
    installed = installer.environment()
    compare = (
        "import kernel; from semel.records.kernel import SOURCE_DIGEST; print(kernel.SOURCE_DIGEST == SOURCE_DIGEST)"
    )
    done = installed.run("python", "-c", compare, variables={"PYTHONPATH": str(found.parent)})
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_a_wheel_without_the_kernel_works_and_warns_once(installer: Installer, tmp_path: Path) -> None:
    """As it is built where there is no compiler at all: it fits every platform, and README's example runs."""
    wheel = installer.build_of_sdist(tmp_path, {"SEMEL_KERNEL": "off"})
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names_in(wheel) if name.endswith(".so")]
    (example,) = [one for one in all_examples("python") if one.page == ROOT / "README.md"]
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    done = installer.environment().run("python", "-c", example.code, variables={"PYTHONPATH": str(unpacked)})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiled codec is missing") == 1


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return set(packed.namelist())


def test_the_repository_is_not_on_the_path_of_these_tests(installer: Installer) -> None:
    """Otherwise they would prove nothing about the wheel."""
    done = installer.environment().run("python", "-c", "import semel, sys; print(semel.__file__, *sys.path)")
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout


def test_the_wheel_holds_what_it_needs_and_no_tests(installer: Installer) -> None:
    """The wheel holds the package, the module that Spark looks for, and Java sources of the bench; no tests."""
    names = names_in(installer.wheel)
    assert {
        "semel/__init__.py",
        "semel/py.typed",
        "pyspark_semel.py",
        "semel/bench/java/OneRecordTransactions.java",
        "semel/metrics/files/alerts.yml",
        "semel/metrics/files/dashboard.json",
    } <= names
    assert not {name for name in names if name.startswith(("tests", SETUPS.parent.name))}
