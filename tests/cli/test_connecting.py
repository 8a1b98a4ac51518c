"""Every command that talks to a cluster finds it in the same ways, and a mirror finds both of its own."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import semel
from semel.broker.process import Broker
from semel.cli.connecting import bridge_settings, side_settings
from semel.cli.main import app

SEMEL = [sys.executable, "-c", "from semel.cli.entry import main; main()"]
WAYS = {"--bootstrap", "--profile", "--config", "--setting"}
SIDED = {
    *("--from", "--from-profile", "--from-config", "--from-setting", "--source-setting"),
    *("--to", "--to-profile", "--to-config", "--to-setting", "--target-setting"),
}
OF_THE_PROGRAM = {("advise",)}
"""Its --bootstrap is written into the program that it prints; it talks to nobody."""


def flags(command: Any, *before: str) -> dict[tuple[str, ...], set[str]]:
    """The flags of each command that can be run."""
    if hasattr(command, "commands"):
        return {
            path: found for name, one in command.commands.items() for path, found in flags(one, *before, name).items()
        }
    return {before: {flag for one in command.params for flag in one.opts}}


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SEMEL_BOOTSTRAP", raising=False)


def write_profiles(folder: Path, text: str) -> None:
    (folder / "semel").mkdir()
    (folder / "semel" / "clusters.toml").write_text(text)


def test_every_command_with_a_cluster_takes_all_ways_to_name_it() -> None:
    """Also those that come later: one flag of them brings the others."""
    every = flags(typer.main.get_command(app))
    for path, found in every.items():
        if "--bootstrap" in found and path not in OF_THE_PROGRAM:
            assert found >= WAYS, path
    assert every["mirror",] >= SIDED
    assert every["relay",] & every["capture",] & every["doctor",] >= WAYS


def test_a_bridge_leaves_out_of_files_what_it_decides_and_hands_on_what_a_flag_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be shared with programs that set acks and ids; a flag is meant for this command, which refuses it."""
    file = tmp_path / "client.properties"
    file.write_text(
        "bootstrap.servers=file:1\nacks=1\ntransactional.id=theirs\nisolation.level=read_uncommitted\n"
        "group.id=g\ncompression.type=zstd\n"
    )
    monkeypatch.setenv("SEMEL_KAFKA_LINGER_MS", "7")
    settings = bridge_settings(None, None, str(file), ["acks=all"])
    assert settings == {
        "bootstrap.servers": "file:1",
        "compression.type": "zstd",
        "linger.ms": "7",
        "acks": "all",
    }, "and Kafka's own timeouts: nobody waits for the answer"
    with pytest.raises(semel.ConfigError, match="No cluster is named, so nothing was started"):
        bridge_settings(None, None, None, None)


def test_a_mirror_finds_each_side_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A password of one cluster is never shown to the other, nor one that names no side to either."""
    write_profiles(
        tmp_path,
        '[east]\nbootstrap.servers = "east:1"\nfetch.max.bytes = 9\ncompression.type = "lz4"\n'
        '[west]\nbootstrap.servers = "west:1"\nfetch.max.bytes = 9\ncompression.type = "lz4"\n',
    )
    monkeypatch.setenv("SEMEL_KAFKA_SASL_PASSWORD", "of no side")
    monkeypatch.setenv("SEMEL_FROM_KAFKA_SASL_PASSWORD", "of the source")
    monkeypatch.setenv("SEMEL_TO_PROFILE", "west")
    assert side_settings("from", None, "east", None, None) == {
        "bootstrap.servers": "east:1",
        "fetch.max.bytes": "9",
        "sasl.password": "of the source",
    }
    assert side_settings("to", None, None, None, ["client.id=me"]) == {
        "bootstrap.servers": "west:1",
        "compression.type": "lz4",
        "client.id": "me",
    }
    monkeypatch.setenv("SEMEL_TO_BOOTSTRAP", "environment:1")
    assert side_settings("to", None, None, None, None)["bootstrap.servers"] == "environment:1"
    assert side_settings("to", "flag:1", "west", None, None)["bootstrap.servers"] == "flag:1"
    assert "bootstrap.servers" not in side_settings("from", None, None, None, None)


def test_a_relay_and_a_mirror_run_with_profiles_alone(semel_broker: Broker, tmp_path: Path) -> None:
    """As an operator calls them: no address on the command line."""
    with semel.Broker() as elsewhere:
        write_profiles(
            tmp_path,
            f'[here]\nbootstrap.servers = "{semel_broker.bootstrap}"\nacks = "1"\n'
            f'[there]\nbootstrap.servers = "{elsewhere.bootstrap}"\n',
        )
        with semel.Admin({"bootstrap.servers": semel_broker.bootstrap}) as admin:
            admin.create_topics(["by-profile"], partitions=1)
        database = tmp_path / "shop.db"
        with sqlite3.connect(database) as connection:
            connection.executescript(semel.outbox_table_sql("sqlite"))
            connection.execute("INSERT INTO outbox (topic, value) VALUES ('by-profile', 'tea')")
        connection.close()

        relay = ["relay", str(database), "--name", "by-profile", "--profile", "here", "--idle-ms", "0"]
        relayed = subprocess.run([*SEMEL, *relay], capture_output=True, text=True, timeout=180, check=False)
        mirror = ["mirror", "--from-profile", "here", "--to-profile", "there", "--topics", "by-profile", "--name", "m"]
        mirrored = subprocess.run(
            [*SEMEL, *mirror, "--idle-ms", "300"], capture_output=True, text=True, timeout=180, check=False
        )

        assert (relayed.returncode, "1 rows in " in relayed.stdout) == (0, True), relayed.stderr
        assert f" to {semel_broker.bootstrap}" in relayed.stdout
        assert (mirrored.returncode, "1 records in 1 cuts" in mirrored.stdout) == (0, True), mirrored.stderr
