"""What a new user types at the command line is answered with what to type instead, or does what it looks like."""

from __future__ import annotations

import logging
import sys

import pytest
from typer.testing import CliRunner

import semel
from semel.bench import SECTIONS
from semel.broker.configs import BrokerSettings
from semel.cli.main import app
from semel.client import settings
from semel.errors import BrokerUnreachable, ConfigError
from semel.verify.programs.program import CommandLine


def test_bench_help_lists_its_sections() -> None:
    """Without starting a measurement to find out."""
    shown = " ".join(CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"}).output.split())
    assert all(section in shown for section in SECTIONS)


@pytest.mark.parametrize("word", ["python", "python3"])
def test_a_command_of_verify_runs_with_the_python_that_runs_semel(word: str) -> None:
    """The packages of the virtual environment are there, though it was not activated."""
    assert CommandLine.parse(f"{word} my_job.py").filled({}) == [sys.executable, "my_job.py"]


def test_a_command_of_verify_with_a_full_path_stays_as_it_is() -> None:
    """Another interpreter can still be chosen."""
    assert CommandLine.parse("/bin/sh job.sh").filled({})[0].endswith("sh")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("log.retention.hour", "log.retention.hours"),
        ("num.partition", "num.partitions"),
        ("message.max.byte", "message"),
    ],
)
def test_a_mistyped_broker_setting_is_refused_with_the_closest_name(name: str, meant: str) -> None:
    """It would otherwise be a line in a log that nobody reads."""
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        BrokerSettings({name: 1}).warn_of_unknown()


@pytest.mark.parametrize("name", ["num.io.threads", "ssl.keystore.location", "zookeeper.connect", "my.plugin.option"])
def test_a_setting_of_kafka_that_is_ignored_stays_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A server.properties file of Apache Kafka can be used as it is."""
    BrokerSettings({name: "1"}).warn_of_unknown()
    assert name in caplog.text


def test_a_broker_with_a_mistyped_setting_does_not_start() -> None:
    """As a user meets it."""
    broker = semel.Broker(config={"log.retention.hour": 1})
    with pytest.raises(BrokerUnreachable, match=r"did you mean log\.retention\.hours"):
        broker.start()
    broker.close()


def test_a_client_setting_without_effect_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka's queue sizes mean nothing here: said once, and not for every client."""
    monkeypatch.setattr(settings, "_warned_of", set[str]())
    with caplog.at_level(logging.WARNING, "semel.client"):
        for _ in range(3):
            settings.parse_config({"bootstrap.servers": "h:1", "queue.buffering.max.messages": 5})
    assert caplog.text.count("queue.buffering.max.messages has no effect") == 1
