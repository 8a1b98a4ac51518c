"""How commands find their cluster: profiles, files, the environment and flags, all under Kafka's own names.

What is more particular wins: a flag over the environment, and each of them over a file or profile that it names.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from semel.client.cluster import Cluster
from semel.client.config import Config
from semel.client.settings import SETTINGS, parse_config
from semel.errors import ConfigError

API_TIMEOUT_MS: Final = 10_000
"""Of a command that somebody waits for, unless default.api.timeout.ms says otherwise."""

PANEL: Final = "Cluster"

Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap", metavar="HOST:PORT", help="Kafka's address; or SEMEL_BOOTSTRAP.", rich_help_panel=PANEL
    ),
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="A table of ~/.config/semel/clusters.toml, with Kafka's names; or SEMEL_PROFILE.",
        rich_help_panel=PANEL,
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A client.properties file as Kafka's own tools take; or SEMEL_CONFIG.",
        rich_help_panel=PANEL,
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        metavar="NAME=VALUE",
        help="A setting of Kafka's clients; may be repeated. Or SEMEL_KAFKA_SASL_PASSWORD and the like.",
        rich_help_panel=PANEL,
    ),
]

_DECIDED_BY_BRIDGES: Final = ("transactional.id", "enable.idempotence", "acks", "isolation.level")
"""Relay, capture and mirror choose these themselves. A file that others use too may have them; a flag may not."""
_FIRST_NAMES: Final = {name: setting.names[0] for setting in SETTINGS for name in setting.names}
_OWNERS: Final = {name: setting.owner for setting in SETTINGS for name in setting.names}


def connect(bootstrap: str | None, profile: str | None, config: str | None, setting: list[str] | None) -> Cluster:
    """A cluster as the user has named it; nothing is sent yet."""
    return Cluster(client_config(bootstrap, profile, config, setting).client)


def client_config(
    bootstrap: str | None,
    profile: str | None,
    config: str | None,
    setting: list[str] | None,
    *,
    is_producer: bool = False,
    more: Mapping[str, object] | None = None,
) -> Config:
    """The settings for a client. Those of producers and consumers in a file are left out where they mean nothing."""
    return parse_config(client_settings(bootstrap, profile, config, setting, is_producer=is_producer, more=more))


def client_settings(
    bootstrap: str | None,
    profile: str | None,
    config: str | None,
    setting: list[str] | None,
    *,
    is_producer: bool = False,
    more: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The same as a mapping."""
    chosen = settings_if_named(bootstrap, profile, config, setting, is_producer=is_producer)
    if chosen is None:
        raise ConfigError(
            "No cluster is named, so nothing was asked: add --bootstrap HOST:PORT or --profile NAME, or set "
            "SEMEL_BOOTSTRAP."
        )
    return {**chosen, **(more or {})}


def settings_if_named(
    bootstrap: str | None,
    profile: str | None,
    config: str | None,
    setting: list[str] | None,
    *,
    is_producer: bool = False,
) -> dict[str, object] | None:
    """The same for commands that can do without a cluster: None if nothing names one."""
    kept = ("client", "security", "producer") if is_producer else ("client", "security")
    merged: dict[str, object] = {"default.api.timeout.ms": API_TIMEOUT_MS}
    for layer in (*_given_around(_HERE, profile, config), _given_by_flags(bootstrap, setting)):
        merged |= {name: value for name, value in layer.items() if _OWNERS.get(name, "client") in kept}
    return merged if "bootstrap.servers" in merged else None


def bridge_settings(
    bootstrap: str | None, profile: str | None, config: str | None, setting: list[str] | None
) -> dict[str, object]:
    """The settings of a relay's or a capture's producer, with Kafka's own defaults: nobody waits for it.

    A setting that a relay may not have is left out of a file, but not of a flag, so that the relay refuses it by name.
    """
    settings = _bridge_settings(_HERE, bootstrap, profile, config, setting, role="producer")
    if "bootstrap.servers" not in settings:
        raise ConfigError(
            "No cluster is named, so nothing was started: add --bootstrap HOST:PORT or --profile NAME, or set "
            "SEMEL_BOOTSTRAP."
        )
    return settings


def side_settings(
    side: Literal["from", "to"],
    bootstrap: str | None,
    profile: str | None,
    config: str | None,
    setting: list[str] | None,
) -> dict[str, object]:
    """The settings of one side of a mirror. Its variables have the side in their names, such as SEMEL_TO_PROFILE, so
    that no password of one cluster is shown to the other. Without an address if nothing names the cluster.
    """
    role = "fetch" if side == "from" else "producer"
    return _bridge_settings(_Variables(f"SEMEL_{side.upper()}_"), bootstrap, profile, config, setting, role=role)


def _bridge_settings(
    variables: _Variables,
    bootstrap: str | None,
    profile: str | None,
    config: str | None,
    setting: list[str] | None,
    *,
    role: Literal["fetch", "producer"],
) -> dict[str, object]:
    merged: dict[str, object] = {}
    for layer in _given_around(variables, profile, config):
        merged |= {
            name: value
            for name, value in layer.items()
            if _OWNERS.get(name, "client") in ("client", "security", role) and name not in _DECIDED_BY_BRIDGES
        }
    return merged | _given_by_flags(bootstrap, setting)


@dataclass(frozen=True, slots=True)
class _Variables:
    """The variables of the environment that name one cluster."""

    before: str

    def get(self, name: str) -> str | None:
        return os.environ.get(f"{self.before}{name}")

    def settings(self) -> dict[str, str]:
        start = f"{self.before}KAFKA_"
        found = {
            name.removeprefix(start).lower().replace("_", "."): value
            for name, value in os.environ.items()
            if name.startswith(start)
        }
        if bootstrap := self.get("BOOTSTRAP"):
            found["bootstrap.servers"] = bootstrap
        return found


_HERE: Final = _Variables("SEMEL_")


def _given_around(variables: _Variables, profile: str | None, config: str | None) -> list[dict[str, str]]:
    """What the environment and files say, the weakest first, under each setting's usual name."""
    layers = (
        _profile(variables.get("PROFILE")),
        _properties(variables.get("CONFIG")),
        variables.settings(),
        _profile(profile),
        _properties(config),
    )
    return [_by_usual_name(layer) for layer in layers]


def _given_by_flags(bootstrap: str | None, setting: list[str] | None) -> dict[str, str]:
    found = _by_usual_name(dict(map(parse_setting, setting or [])))
    return found if bootstrap is None else {**found, "bootstrap.servers": bootstrap}


def _by_usual_name(layer: Mapping[str, str]) -> dict[str, str]:
    return {_FIRST_NAMES.get(name, name): value for name, value in layer.items()}


def parse_setting(text: str) -> tuple[str, str]:
    """
    >>> parse_setting("security.protocol=SSL")
    ('security.protocol', 'SSL')
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError("A --setting has no name or no '=': write NAME=VALUE, such as security.protocol=SSL.")
    return name.strip(), value


def _properties(path: str | None) -> dict[str, str]:
    """Kafka's properties files: NAME=VALUE or NAME: VALUE, `#` and `!` for comments, `\\` at the end goes on."""
    if not path:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The configuration file {path!r} cannot be read ({_reason(error)}); nothing was asked."
        ) from error
    found: dict[str, str] = {}
    for number, line in enumerate(text.replace("\\\n", "").splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        cut = min((place for sign in "=:" if (place := line.find(sign)) > 0), default=-1)
        if cut < 0:
            raise ConfigError(f"Line {number} of {path!r} is no setting: write NAME=VALUE. Nothing was asked.")
        found[line[:cut].strip()] = line[cut + 1 :].strip()
    return found


def profiles_path() -> Path:
    """Where profiles are: SEMEL_PROFILES, or semel/clusters.toml in the user's configuration folder."""
    if given := os.environ.get("SEMEL_PROFILES"):
        return Path(given)
    folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(folder) / "semel" / "clusters.toml"


def _profile(name: str | None) -> dict[str, str]:
    if not name:
        return {}
    path = profiles_path()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"The profile {name!r} cannot be read from {str(path)!r} ({_reason(error)}); nothing was asked."
        ) from error
    if not isinstance(tables.get(name), dict):
        known = ", ".join(repr(one) for one, table in tables.items() if isinstance(table, dict)) or "none"
        raise ConfigError(f"{str(path)!r} has no profile {name!r}; it has {known}. Nothing was asked.")
    return dict(_flatten(tables[name]))


def _flatten(table: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """TOML reads `sasl.username = "a"` as a table within a table.

    >>> _flatten({"bootstrap": {"servers": "a:9092"}, "check.crcs": True})
    [('bootstrap.servers', 'a:9092'), ('check.crcs', 'true')]
    """
    found: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            found += _flatten(value, f"{before}{name}.")
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found.append((f"{before}{name}", text))
    return found


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error).splitlines()[0]
