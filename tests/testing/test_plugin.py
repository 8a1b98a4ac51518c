"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

# With another library than Semel's own: the fixture is for everybody.
A_TEST = """
from confluent_kafka import Consumer, Producer

def test_produce(semel_broker):
    producer = Producer({"bootstrap.servers": semel_broker.bootstrap, "enable.idempotence": True})
    producer.produce("orders", b"one")
    assert producer.flush(30) == 0
    assert len(producer.list_topics("orders").topics["orders"].partitions) == PARTITIONS

def test_consume(semel_broker):
    config = {"bootstrap.servers": semel_broker.bootstrap, "group.id": "g", "auto.offset.reset": "earliest"}
    consumer = Consumer(config)
    consumer.subscribe(["orders"])
    message = consumer.poll(30)
    assert message.value() == b"one"
    consumer.close()
    print("broker", semel_broker.process_id, semel_broker.data)
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rP", *arguments)


def test_tests_share_one_broker_which_leaves_nothing_behind(pytester: pytest.Pytester) -> None:
    """Session-scoped: the second test reads what the first has written; afterwards process and folder are gone."""
    pytester.makepyfile(A_TEST.replace("PARTITIONS", "1"))
    result = run(pytester)
    result.assert_outcomes(passed=2)
    line = next(line for line in result.outlines if line.startswith("broker "))
    process_id, folder = line.split()[1:]
    gone = "import os, sys; sys.exit(os.path.exists(sys.argv[1]) or os.path.exists('/proc/' + sys.argv[2]))"
    assert subprocess.run([sys.executable, "-c", gone, folder, process_id], check=False).returncode == 0


def test_its_settings_can_be_overridden(pytester: pytest.Pytester) -> None:
    """By a fixture in a conftest.py, under Kafka's names."""
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(scope="session")
        def semel_broker_config():
            return {"num.partitions": 4}
        """
    )
    pytester.makepyfile(A_TEST.replace("PARTITIONS", "4"))
    run(pytester).assert_outcomes(passed=2)


def test_loading_the_plugin_imports_nothing_of_semel() -> None:
    """It is loaded in every pytest run of everybody who has Semel installed."""
    code = (
        "import sys, pytest; before = set(sys.modules); import semel.testing.plugin; "
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    hook = "'semel.spark', 'semel.spark.driver_python'"  # what `import semel` itself brings
    assert done.stdout.strip() == f"['semel', {hook}, 'semel.testing', 'semel.testing.plugin']"
