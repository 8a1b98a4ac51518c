"""Other users of the machine: what the broker writes is not for them, and a key that they can read is refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import semel
from semel.broker.listeners import ListenerSettings, TlsSettings
from semel.broker.process import Broker
from semel.broker.storage.data_directory import DataDirectory
from semel.broker.storage.log_settings import LogSettings
from semel.broker.tls import server_context
from semel.errors import ConfigError
from semel.testing.certificates import make_certificates

OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """What a login shell has: without care, every file can be read by all."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    everything = [folder, *folder.rglob("*")]
    return [str(path.relative_to(folder)) for path in everything if path.lstat().st_mode & OF_OTHERS]


def write_and_commit(bootstrap: str) -> None:
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics("orders", config={"segment.bytes": "1048576"})
    with semel.Producer(bootstrap_servers=bootstrap, transactional_id="writer") as producer, producer.transaction():
        producer.send("orders", b"secret")


def test_nothing_that_a_broker_writes_can_be_read_by_other_users(tmp_path: Path) -> None:
    """Segments, indexes, snapshots, metadata, the log of the process: all of it, also after a stop and a restart."""
    data = tmp_path / "data"
    with Broker(data=data) as broker:
        write_and_commit(broker.bootstrap)
        broker.restart()
        assert open_to_others(data) == []
        assert open_to_others(broker.log_path.parent) == []
    assert open_to_others(data) == []
    kinds = {path.suffix for path in data.rglob("*") if path.is_file()}
    assert {".log", ".index", ".meta"} <= kinds, kinds


def test_an_old_data_directory_is_closed_to_others_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier versions left the rights to the umask. The directory itself and files of others stay as they are."""
    directory = DataDirectory(str(tmp_path))
    directory.open_partition("orders", 0, LogSettings(), now_ms=0).close()
    directory.write_meta("scram-credentials.json", b"{}")
    directory.close()
    (tmp_path / "notes.txt").write_text("the user's own")
    for path in (tmp_path / "orders-0", tmp_path):
        path.chmod(0o755)
    credentials = tmp_path / "scram-credentials.json.meta"
    credentials.chmod(0o644)

    DataDirectory(str(tmp_path)).close()

    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "orders-0").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "notes.txt").stat().st_mode) == 0o644
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert f"could read 2 files and directories in {tmp_path}" in caplog.text
    assert "change their passwords" in caplog.text


def test_a_link_in_the_data_directory_changes_no_rights_elsewhere(tmp_path: Path) -> None:
    """A partition that was moved to another disk by a link is the user's doing, and its target is left alone."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o755)
    data = tmp_path / "data"
    DataDirectory(str(data)).close()
    (data / "orders-0").symlink_to(elsewhere)
    DataDirectory(str(data)).close()
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


@pytest.mark.parametrize("in_one_file", [False, True])
def test_a_key_that_everybody_can_read_is_refused(tmp_path: Path, in_one_file: bool) -> None:
    """As the file of users is; and the sentence says how to make it right."""
    server = make_certificates().server
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    certificate.write_text(server.certificate_pem + (server.key_pem if in_one_file else ""))
    key.write_text(server.key_pem)
    tls = TlsSettings(certificate_path=str(certificate), key_path=None if in_one_file else str(key))
    listener = ListenerSettings(security_protocol="SSL", tls=tls)
    with pytest.raises(ConfigError, match=r"key of the broker's certificate.*read by everybody.*chmod 600"):
        server_context(listener)
    (certificate if in_one_file else key).chmod(0o640)
    server_context(listener)
