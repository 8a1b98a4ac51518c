"""The command line of the broker: what can be said there, checked, and turned into options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigError
from semel.private_files import refuse_readable_by_all

if TYPE_CHECKING:
    from semel.broker.listeners import ListenerSettings, TlsSettings
    from semel.broker.state import BrokerOptions

DEFAULT_PORT: Final = 9092
DEFAULT_UI_PORT: Final = 8484
DEFAULT_DATA: Final = "semel-data"
_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_LISTENER: Final = re.compile(r"(?P<protocol>\w+)://(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d+)")

_EXAMPLE: Final = """\
It prints "semel broker ready on HOST:PORT" when clients can connect, and ends cleanly on SIGTERM or Ctrl-C.

  semel broker --port 9092 --data ./semel-data
  semel broker --ui
  semel broker --listener SASL_PLAINTEXT://127.0.0.1:9093 --users users.txt
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What the command line says."""

    options: BrokerOptions
    metrics_port: int | None
    ui_port: int | None
    log_level: str


def parse_arguments(argv: Sequence[str], *, program: str = "semel broker") -> Arguments:
    """Read a command line. Leaves with code 2 when it is not one; raises ConfigError for values that cannot be."""
    given = _parser(program).parse_args(argv)
    # Here and not above: `--help` and a wrong command line need nothing of the broker.
    from semel.broker.configs import BrokerSettings
    from semel.broker.durability import Fsync
    from semel.broker.state import BrokerOptions

    config = _config(given)
    settings = BrokerSettings(config)
    data = given.data or next(iter(settings.log_dirs), None) or config.get("log.dir") or DEFAULT_DATA
    listeners = _listeners(given, frame_bytes_max=settings.socket_request_bytes_max)
    mechanisms = {name for listener in listeners for name in listener.sasl_mechanisms}
    users = _read_users(given.users) if given.users else {}
    options = BrokerOptions(
        data=Path(data).absolute(),
        config=config,
        listeners=listeners,
        fsync=Fsync(given.fsync),
        plain_users=users if "PLAIN" in mechanisms else {},
        scram_users=users if mechanisms - {"PLAIN"} else {},
    )
    return Arguments(
        options=options,
        metrics_port=given.metrics_port,
        ui_port=_ui_port(given.ui, listeners),
        log_level="error" if given.quiet else given.log_level,
    )


def _ui_port(port: int | None, listeners: Sequence[ListenerSettings]) -> int | None:
    if port is None:
        return None
    if find_spec("starlette") is None or find_spec("uvicorn") is None or find_spec("jinja2") is None:
        raise ConfigError("The page of --ui is not installed. Install it: pip install 'semel[ui]'")
    if not any(listener.security_protocol == "PLAINTEXT" for listener in listeners):
        raise ConfigError(
            "--ui has no login for this broker, and every listener asks for one or for TLS. Start semel ui by itself, "
            "with --config FILE."
        )
    return port


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="A Kafka broker in one process, for any Kafka client.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", metavar="DIR", help=f"where everything is kept (default: ./{DEFAULT_DATA})")
    add("--fsync", choices=("always", "commit", "never"), default="commit", help="what survives a power cut")
    add("--config", metavar="KEY=VALUE", action="append", default=[], help="a setting, by Kafka's name; repeatable")
    add("--config-file", metavar="FILE", help="settings as a Java properties file; --config is stronger")

    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", help="default: 127.0.0.1, so that only this machine can connect")
    where.add_argument("--port", type=_port, help=f"default: {DEFAULT_PORT}; 0 takes a free one")
    where.add_argument(
        "--listener",
        metavar="PROTOCOL://HOST:PORT",
        action="append",
        default=[],
        help="instead of --host and --port; repeatable; PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL",
    )
    where.add_argument("--advertised-host", metavar="HOST", help="what clients are told to connect to")

    security = parser.add_argument_group("security")
    security.add_argument("--tls-certificate", metavar="FILE", help="the broker's certificate chain (PEM)")
    security.add_argument("--tls-key", metavar="FILE", help="its key (PEM), unless the certificate's file has it")
    security.add_argument("--tls-key-password-file", metavar="FILE", help="what opens an encrypted key")
    security.add_argument("--tls-client-authority", metavar="FILE", help="who signs the clients' certificates (PEM)")
    security.add_argument("--client-auth", choices=("none", "requested", "required"), help="of SSL listeners")
    security.add_argument("--sasl-mechanisms", metavar="NAME,...", help="default: all, if a listener uses SASL")
    security.add_argument("--users", metavar="FILE", help="lines of name=password, readable by nobody else")

    watching = parser.add_argument_group("watching")
    watching.add_argument("--metrics-port", metavar="PORT", type=_port, help="metrics for Prometheus, on 127.0.0.1")
    watching.add_argument(
        "--ui",
        metavar="PORT",
        nargs="?",
        type=_port,
        const=DEFAULT_UI_PORT,
        help=f"a page about this broker, on 127.0.0.1 (default port: {DEFAULT_UI_PORT}; needs semel[ui])",
    )
    watching.add_argument("--log-level", choices=_LOG_LEVELS, default="info", help="what is told on standard error")
    watching.add_argument("--quiet", action="store_true", help="tell errors only")
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdecimal() else -1
    if not 0 <= port <= 65_535:
        raise argparse.ArgumentTypeError(f"{text} is no port: write a number up to 65535, or 0 for a free one")
    return port


# -- settings ----------------------------------------------------------------------------------------------------------


def _config(given: Any) -> dict[str, str]:
    config = parse_properties(_read(given.config_file, "The config file")) if given.config_file else {}
    for item in given.config:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--config {item} names no value: write KEY=VALUE, such as num.partitions=3.")
        config[name.strip()] = value.strip()
    return config


def parse_properties(text: str) -> dict[str, str]:
    r"""The names and values of a Java properties file.

    >>> parse_properties("# a comment\nnum.partitions = 3\nsuper.users: User:ann;\\\n  User:bob")
    {'num.partitions': '3', 'super.users': 'User:ann;User:bob'}
    """
    config: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        line = line.lstrip()
        if not line or line[0] in "#!":
            continue
        while _is_continued(line):
            line = line[:-1] + next(lines, "").lstrip()
        match = _PROPERTY.fullmatch(line)
        if match is not None:
            config[_unescaped(match["name"])] = _unescaped(match["value"])
    return config


_PROPERTY: Final = re.compile(r"(?P<name>(?:\\.|[^\\=:\s])*)\s*[=:]?\s*(?P<value>.*)", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_ESCAPED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def _is_continued(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPED.get(code, code)

    return _ESCAPE.sub(character, text)


# -- listeners ---------------------------------------------------------------------------------------------------------


def _listeners(given: Any, *, frame_bytes_max: int) -> list[ListenerSettings]:
    from semel.broker.listeners import MECHANISMS, ListenerSettings

    if given.listener and (given.host is not None or given.port is not None):
        raise ConfigError("--listener says where to listen, and so do --host and --port: use one or the other.")
    port = DEFAULT_PORT if given.port is None else given.port
    addresses = [_address(text) for text in given.listener] or [("PLAINTEXT", given.host or "127.0.0.1", port)]
    protocols = [protocol for protocol, _, _ in addresses]
    _refuse_unused(given, protocols)
    named = given.sasl_mechanisms.split(",") if given.sasl_mechanisms else MECHANISMS
    mechanisms = tuple(name.strip().upper() for name in named)
    return [
        ListenerSettings(
            host=host,
            port=port,
            security_protocol=protocol,
            advertised_host=given.advertised_host,
            tls=_tls(given, protocol) if protocol in ("SSL", "SASL_SSL") else None,
            sasl_mechanisms=mechanisms if protocol.startswith("SASL_") else (),
            frame_bytes_max=frame_bytes_max,
        )
        for protocol, host, port in addresses
    ]


def _address(text: str) -> tuple[Any, str, int]:
    match = _LISTENER.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--listener {text} is no address: write PROTOCOL://HOST:PORT, as PLAINTEXT://127.0.0.1:9092."
        )
    return match["protocol"].upper(), match["ipv6"] or match["host"], int(match["port"])


def _refuse_unused(given: Any, protocols: Sequence[str]) -> None:
    """Somebody who names a certificate or users believes that the listener is secured by them."""
    if given.tls_certificate and not any(protocol.endswith("SSL") for protocol in protocols):
        raise ConfigError("No listener would use the certificate: add --listener SSL://HOST:PORT or SASL_SSL://....")
    if (given.tls_key or given.tls_key_password_file) and not given.tls_certificate:
        raise ConfigError("A key is of no use without its certificate: add --tls-certificate FILE.")
    asks = given.client_auth in ("requested", "required")
    if asks and "SSL" not in protocols:
        raise ConfigError(
            f"No listener would look at client certificates, so --client-auth {given.client_auth} protects nothing: "
            "add --listener SSL://HOST:PORT. On SASL_SSL the login tells who the client is, as in Apache Kafka."
        )
    if given.tls_client_authority and not asks:
        raise ConfigError(
            "Nobody would be asked for a certificate of --tls-client-authority: add --client-auth required, or "
            "requested if clients without one may connect too."
        )
    if (given.users or given.sasl_mechanisms) and not any(protocol.startswith("SASL_") for protocol in protocols):
        raise ConfigError(
            "No listener would ask for a login: add --listener SASL_SSL://HOST:PORT or SASL_PLAINTEXT://...."
        )


def _tls(given: Any, protocol: str) -> TlsSettings:
    from semel.broker.listeners import TlsSettings

    if not given.tls_certificate:
        raise ConfigError(f"A listener with {protocol} needs the broker's certificate: add --tls-certificate FILE.")
    password_file = given.tls_key_password_file
    return TlsSettings(
        certificate_path=given.tls_certificate,
        key_path=given.tls_key,
        key_password=_read_secret(password_file, "The key's password file").strip("\r\n") if password_file else None,
        client_ca_path=given.tls_client_authority,
        # As in Apache Kafka, on SASL_SSL the login tells who the client is.
        client_auth=(given.client_auth or "none") if protocol == "SSL" else "none",
    )


# -- files -------------------------------------------------------------------------------------------------------------


def _read_users(path: str) -> Mapping[str, str]:
    users: dict[str, str] = {}
    for number, line in enumerate(_read_secret(path, "The users file").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, password = line.partition("=")
        if not equals or not name.strip() or not password:
            raise ConfigError(f"Line {number} of {path} is not name=password, so the broker did not start.")
        users[name.strip()] = password
    return users


def _read_secret(path: str, what: str) -> str:
    text = _read(path, what)
    refuse_readable_by_all(path, what)
    return text


def _read(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} is not text in UTF-8.") from None
