"""The broker's command line: what it means, and one clear sentence where it cannot be meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from semel.broker.__main__ import main
from semel.broker.arguments import parse_arguments, parse_properties
from semel.broker.durability import Fsync
from semel.errors import ConfigError


def test_without_arguments_it_listens_on_loopback_only() -> None:
    """Defaults: 127.0.0.1:9092, a folder beside, and commits that survive a power cut."""
    arguments = parse_arguments([])
    (listener,) = arguments.options.listeners
    assert (listener.host, listener.port, listener.security_protocol) == ("127.0.0.1", 9092, "PLAINTEXT")
    assert arguments.options.data == Path.cwd() / "semel-data"
    assert arguments.options.fsync is Fsync.COMMIT
    assert (arguments.metrics_port, arguments.log_level) == (None, "info")


def test_settings_come_from_a_file_and_the_command_line_is_stronger(tmp_path: Path) -> None:
    """A Java properties file as Kafka's own server.properties, with single settings put over it."""
    file = tmp_path / "server.properties"
    file.write_text("# mine\nnum.partitions=3\nlog.dirs=/kept/here\nnode.id : 7\n")
    arguments = parse_arguments(["--config-file", str(file), "--config", "num.partitions=5", "--fsync", "always"])
    assert arguments.options.config == {"num.partitions": "5", "log.dirs": "/kept/here", "node.id": "7"}
    assert arguments.options.data == Path("/kept/here")
    assert arguments.options.fsync is Fsync.ALWAYS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b=c", {"a": "b=c"}),
        ("a b", {"a": "b"}),
        ("  a   =   b  ", {"a": "b  "}),
        ("! no\n\na:b\r\nc=", {"a": "b", "c": ""}),
        ("a=1,\\\n   2", {"a": "1,2"}),
        ("a=back\\\\", {"a": "back\\"}),
        ("a\\ b=\\u00e4\\t", {"a b": "ä\t"}),
    ],
)
def test_properties_are_read_as_java_does(text: str, expected: dict[str, str]) -> None:
    """Comments, three ways to separate, continued lines and escapes."""
    assert parse_properties(text) == expected


def test_listeners_have_a_protocol_each(tmp_path: Path) -> None:
    """Several listeners, one with a login; IPv6 in brackets."""
    users = tmp_path / "users"
    users.write_text("ann=se=cret\n# nobody\nbob= with spaces \n")
    users.chmod(0o600)
    where = ["--listener", "PLAINTEXT://[::1]:0", "--listener", "sasl_plaintext://localhost:9093"]
    login = ["--users", str(users), "--sasl-mechanisms", "plain, scram-sha-256"]
    arguments = parse_arguments([*where, *login, "--config", "socket.request.max.bytes=1000"])
    plain, sasl = arguments.options.listeners
    assert (plain.host, plain.port, plain.uses_sasl) == ("::1", 0, False)
    assert (sasl.host, sasl.port, sasl.sasl_mechanisms) == ("localhost", 9093, ("PLAIN", "SCRAM-SHA-256"))
    assert sasl.frame_bytes_max == 1000
    assert arguments.options.plain_users == arguments.options.scram_users == {"ann": "se=cret", "bob": " with spaces "}


def test_only_the_kinds_of_login_that_are_offered_know_the_users(tmp_path: Path) -> None:
    """A listener without PLAIN must not accept a password sent in the clear."""
    users = tmp_path / "users"
    users.write_text("ann=secret\n")
    users.chmod(0o600)
    arguments = parse_arguments(
        ["--listener", "SASL_PLAINTEXT://127.0.0.1:0", "--users", str(users), "--sasl-mechanisms", "SCRAM-SHA-512"]
    )
    assert (arguments.options.plain_users, arguments.options.scram_users) == ({}, {"ann": "secret"})


def test_tls_files_go_to_the_listeners_that_use_them(tmp_path: Path) -> None:
    """Client certificates count on SSL only, as in Kafka; the password's line end is not part of it."""
    password = tmp_path / "password"
    password.write_text("opens it\n")
    password.chmod(0o600)
    where = ["--listener", "SSL://127.0.0.1:0", "--listener", "SASL_SSL://127.0.0.1:0"]
    key = ["--tls-certificate", "c.pem", "--tls-key", "k.pem", "--tls-key-password-file", str(password)]
    arguments = parse_arguments([*where, *key, "--tls-client-authority", "ca.pem", "--client-auth", "required"])
    ssl, sasl_ssl = (listener.tls for listener in arguments.options.listeners)
    assert ssl is not None
    assert sasl_ssl is not None
    assert (ssl.certificate_path, ssl.key_path, ssl.key_password) == ("c.pem", "k.pem", "opens it")
    assert (ssl.client_auth, sasl_ssl.client_auth) == ("required", "none")


_CERTIFICATE = ["--tls-certificate", "c.pem"]
_AUTHORITY = ["--tls-client-authority", "ca.pem"]
WRONG = {
    "no value": (["--config", "num.partitions"], "KEY=VALUE"),
    "no number": (["--config", "num.partitions=many"], "num.partitions"),
    "out of range": (["--config", "num.partitions=0"], "num.partitions"),
    "no address": (["--listener", "127.0.0.1:9092"], "PROTOCOL://HOST:PORT"),
    "unknown protocol": (["--listener", "HTTP://127.0.0.1:9092"], "HTTP is not known"),
    "port too large": (["--listener", "PLAINTEXT://127.0.0.1:70000"], "70000 is no port"),
    "two ways": (["--listener", "PLAINTEXT://127.0.0.1:0", "--port", "1"], "one or the other"),
    "no certificate": (["--listener", "SSL://127.0.0.1:0"], "--tls-certificate"),
    "unused certificate": (["--tls-certificate", "c.pem"], "No listener would use the certificate"),
    "unused key": (["--tls-key", "k.pem"], "--tls-certificate"),
    "client certificates without TLS": (["--client-auth", "required"], "protects nothing"),
    "client certificates on SASL_SSL": (
        ["--listener", "SASL_SSL://127.0.0.1:0", *_CERTIFICATE, *_AUTHORITY, "--client-auth", "required"],
        "protects nothing",
    ),
    "an authority that nobody asks for": (
        ["--listener", "SSL://127.0.0.1:0", *_CERTIFICATE, *_AUTHORITY],
        "add --client-auth required",
    ),
    "an authority and no certificates": (
        ["--listener", "SSL://127.0.0.1:0", *_CERTIFICATE, *_AUTHORITY, "--client-auth", "none"],
        "add --client-auth required",
    ),
    "client certificates without an authority": (
        ["--listener", "SSL://127.0.0.1:0", *_CERTIFICATE, "--client-auth", "requested"],
        "needs the authority",
    ),
    "unused users": (["--users", "users.txt"], "No listener would ask for a login"),
    "unknown mechanism": (
        ["--listener", "SASL_PLAINTEXT://127.0.0.1:0", "--sasl-mechanisms", "GSSAPI"],
        "GSSAPI is not known",
    ),
    "no such file": (["--config-file", "/there/is/no/such/file"], "cannot be read"),
    "wildcard": (["--host", "0.0.0.0"], "advertised host"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_one_clear_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, what is wrong and what to write instead, and no traceback."""
    arguments, words = WRONG[name]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("semel broker cannot start: ")
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--port", "x"], ["--port", "70000"], ["--fsync", "often"], ["--unknown"]])
def test_a_wrong_command_line_is_a_matter_of_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the usage, as with any command."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: semel broker" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o666])
def test_a_file_of_passwords_that_everybody_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """And the sentence says how to make it right."""
    users = tmp_path / "users"
    users.write_text("ann=secret\n")
    users.chmod(mode)
    with pytest.raises(ConfigError, match=r"read by everybody.*chmod 600"):
        parse_arguments(["--listener", "SASL_PLAINTEXT://127.0.0.1:0", "--users", str(users)])


def test_a_line_without_a_password_is_told_by_its_number_only(tmp_path: Path) -> None:
    """What stands there may be a password, which belongs into no message."""
    users = tmp_path / "users"
    users.write_text("ann=secret\nhunter2\n")
    users.chmod(0o600)
    with pytest.raises(ConfigError, match="Line 2") as refused:
        parse_arguments(["--listener", "SASL_PLAINTEXT://127.0.0.1:0", "--users", str(users)])
    assert "hunter2" not in str(refused.value)


def test_the_command_line_is_there_without_typer_arrow_or_hypothesis() -> None:
    """A start below half a second lives on what is not imported."""
    code = (
        "import sys; sys.argv = ['semel', 'broker', '--help']\n"
        "from semel.cli.entry import main\n"
        "try: main()\n"
        "except SystemExit as left: assert left.code == 0\n"
        "import semel.broker.run\n"
        "heavy = {'typer', 'rich', 'click', 'numpy', 'pyarrow', 'hypothesis', 'prometheus_client', 'scramp'}\n"
        "print('loaded:', sorted(name for name in heavy if sys.modules.get(name)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--sasl-mechanisms" in done.stdout
    assert done.stdout.endswith("loaded: []\n")


def test_the_semel_command_lists_the_broker_and_passes_its_arguments_on() -> None:
    """`semel --help` names it, and through typer it is the same command."""
    from typer.testing import CliRunner

    from semel.cli.main import app

    assert "broker" in CliRunner().invoke(app, ["--help"]).stdout
    assert CliRunner().invoke(app, ["broker", "--config", "num.partitions=many"]).exit_code == 1
    assert "--sasl-mechanisms" in CliRunner().invoke(app, ["broker", "--help"]).stdout
