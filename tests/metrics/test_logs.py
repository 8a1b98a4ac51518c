"""Log lines as text and as JSON, asked for by a function or by SEMEL_LOG; and nothing else unless asked."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import semel
from semel.errors import ConfigError
from semel.spark.progress import log_event

LOG = logging.getLogger("semel.session")


def lines_of(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_line_is_one_object_with_its_fields() -> None:
    """Also of a message with line breaks and of an exception, and with what the block and the event belong to."""
    stream = io.StringIO()
    semel.logs.json(stream=stream)
    try:
        with semel.logs.fields(pipeline="orders", batch_id=3):
            LOG.info("two\nlines")
            log_event("batch committed", records=7)
            try:
                raise ValueError("no amount")
            except ValueError:
                LOG.exception("failed")
        LOG.debug("too little")
    finally:
        semel.logs.off()
    first, event, failed = lines_of(stream)
    assert (first["message"], first["level"], first["logger"]) == ("two\nlines", "info", "semel.session")
    assert (first["pipeline"], first["batch_id"]) == ("orders", 3)
    assert str(first["time"]).endswith("+00:00")
    assert (event["message"], event["records"], event["pipeline"]) == ("batch committed", 7, "orders")
    assert "ValueError: no amount" in str(failed["error"])


def test_a_field_cannot_take_the_place_of_the_message() -> None:
    """Whatever a caller names its fields."""
    stream = io.StringIO()
    semel.logs.json(stream=stream)
    try:
        with semel.logs.fields(message="other", level="none"):
            LOG.info("mine")
    finally:
        semel.logs.off()
    [line] = lines_of(stream)
    assert (line["message"], line["level"]) == ("mine", "info")


def test_text_shows_the_same_fields() -> None:
    """For people."""
    stream = io.StringIO()
    semel.logs.text(stream=stream)
    try:
        with semel.logs.fields(pipeline="orders", job_id=None):
            log_event("batch committed", records=7)
    finally:
        semel.logs.off()
    assert stream.getvalue().endswith("INFO semel.spark: batch committed [pipeline=orders records=7]\n")


def test_the_last_call_counts_and_off_leaves_nothing_behind() -> None:
    """A program that calls it twice does not get each line twice."""
    first, second = io.StringIO(), io.StringIO()
    semel.logs.json(stream=first)
    semel.logs.json("warning", stream=second)
    LOG.info("quiet")
    LOG.warning("loud")
    semel.logs.off()
    LOG.warning("after")
    assert first.getvalue() == ""
    assert [line["message"] for line in lines_of(second)] == ["loud"]
    assert (logging.getLogger("semel").handlers, logging.getLogger("semel").propagate) == ([], True)
    with pytest.raises(ConfigError, match="none of debug, info"):
        semel.logs.json("chatty")


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_the_environment_asks_for_it_too() -> None:
    """Without a change to the program; without the variable a library is quiet."""
    program = "import logging, semel; logging.getLogger('semel.x').info('hello')"
    [line] = run(program, SEMEL_LOG="json").stderr.splitlines()
    assert json.loads(line)["message"] == "hello"
    assert "INFO semel.x: hello" in run(program, SEMEL_LOG="text").stderr
    assert run(program, SEMEL_LOG="json", SEMEL_LOG_LEVEL="warning").stderr == ""
    assert run(program).stderr == ""
    assert "write json or text" in run(program, SEMEL_LOG="xml").stderr


def test_the_brokers_log_is_json_too(tmp_path: Path) -> None:
    """`semel broker` with SEMEL_LOG=json writes objects alone, at its own log level."""
    command = [sys.executable, "-m", "semel.broker", "--data", str(tmp_path), "--port", "0", "--metrics-port", "0"]
    env = {**os.environ, "SEMEL_LOG": "json"}
    for level, is_quiet in (("info", False), ("warning", True)):
        with subprocess.Popen(
            [*command, "--log-level", level], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as broker:
            assert broker.stdout is not None
            assert broker.stdout.readline().startswith("semel broker ready")
            broker.terminate()
            _, errors = broker.communicate(timeout=60)
        found = [json.loads(line) for line in errors.splitlines()]
        assert (found == []) is is_quiet
        assert {line["logger"].split(".")[0] for line in found} <= {"semel"}
