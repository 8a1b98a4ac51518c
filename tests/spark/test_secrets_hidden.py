"""No object that holds a user's settings shows the password in its repr, which ends up in logs and notebooks."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from semel.client.settings import parse_config
from semel.errors import ConfigError
from semel.spark.encode import Encode
from semel.spark.options import make_options
from semel.spark.rows import EncodeInPlan
from semel.spark.source_options import parse_options
from semel.spark.source_task import ReadTask
from semel.spark.write import Write
from semel.verify.clients.face import Surroundings
from semel.verify.workloads.life import WorkerSpec

SECRET = "hunter22"
LOGIN: dict[str, Any] = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "ann",
    "sasl.password": SECRET,
}
SETTINGS: dict[str, Any] = {"bootstrap.servers": "localhost:9092", **LOGIN}
ANYTHING: Any = None


def everything() -> dict[str, object]:
    sink = make_options(name="p", bootstrap="localhost:9092", topic="t", settings=LOGIN, more_settings={})
    spark = {f"kafka.{name}": value for name, value in SETTINGS.items()}
    return {
        "sink": sink,
        "encode": Encode(SETTINGS, "t", {}, ANYTHING, 0, "seed"),
        "encode in a plan": EncodeInPlan(SETTINGS, "t"),
        "write": Write(SETTINGS, ANYTHING, ANYTHING),
        "source": parse_options({**spark, "subscribe": "t"}),
        "client": parse_config(SETTINGS),
        "verify": Surroundings("localhost:9092", [], "c", SETTINGS),
        "worker": WorkerSpec("f", 0, "n", 0, "r", 0, 1, "w", "p", "semel", "b", [], 1, SETTINGS),
        "read task": ReadTask(settings=SETTINGS, columns=(), fail_on_data_loss=True),
    }


@pytest.mark.parametrize("name", everything())
def test_no_repr_shows_the_password(name: str) -> None:
    """As `print(options)` and a failed assertion would."""
    holder = everything()[name]
    assert SECRET not in repr(holder)
    assert SECRET not in str(holder)


WRONG: dict[str, dict[str, object]] = {
    "misspelt": {"sasl.pasword": SECRET},
    "no text": {"sasl.password": [SECRET]},
    "twice": {"sasl.jaas.config": f'a.b.PlainLoginModule required username="ann" password="{SECRET}x";'},
    "no protocol": {"security.protocol": "PLAINTEXT"},
    "half a character": {"sasl.password": SECRET + "\ud800"},
    "too long": {"sasl.password": SECRET * 10_000},
    "broken login line": {"sasl.jaas.config": f'nothing password="{SECRET}"'},
}


@pytest.mark.parametrize("name", WRONG)
def test_no_error_about_settings_shows_the_password(name: str) -> None:
    """Nor does the traceback's text of the errors before it."""
    with pytest.raises(ConfigError) as refused:
        parse_config({**SETTINGS, **WRONG[name]})
    assert SECRET not in "".join(traceback.format_exception_only(refused.value))
    assert SECRET not in str(refused.value.__cause__)


LONG = "x" * 32_768


@pytest.mark.parametrize("name", ["client.id", "transactional.id", "group.id", "group.instance.id", "client.rack"])
def test_an_id_that_the_protocol_has_no_room_for_is_refused_at_once(name: str) -> None:
    """By its name and its size, and before anything is sent; one byte less is fine."""
    with pytest.raises(ConfigError, match=rf"{name} takes 32768 bytes.*32767"):
        parse_config({"bootstrap.servers": "localhost:9092", name: LONG})
    with pytest.raises(ConfigError, match=f"{name} has a character"):
        parse_config({"bootstrap.servers": "localhost:9092", name: "\ud800"})
    parse_config({"bootstrap.servers": "localhost:9092", name: LONG[:-1]})
    with pytest.raises(ConfigError, match=r"takes 32769 bytes"):
        parse_config({"bootstrap.servers": "localhost:9092", name: LONG[:-2] + "äb"})
