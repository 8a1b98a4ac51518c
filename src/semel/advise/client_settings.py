"""Settings of one client, whoever's spelling they have, as the doctor's rules see them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from semel.advise.settings_yaml import read_yaml
from semel.errors import ConfigError

_YAML: Final = (".yml", ".yaml")
_SAME: Final[Mapping[str, str]] = {
    "request.required.acks": "acks",
    "message.send.max.retries": "retries",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "auto.commit.enable": "enable.auto.commit",
    "spark.sql.streaming.checkpointlocation": "checkpointlocation",
}
"""Other clients' spellings."""
_PREFIX: Final = re.compile(
    r"(?:spring\.kafka\.(?:(producer|consumer)\.)?(?:properties\.)?"
    r"|(?:debezium\.sink\.kafka\.)?(producer|consumer)\.(?:override\.)?"
    r"|spring\.cloud\.stream\.kafka\.binder\.(?:transaction\.)?(?:(producer|consumer)[.-])?(?:configuration\.|properties\.)?"
    r"|kafka\.)"
)
"""Spring, Kafka Connect and Spark put a word before Kafka's names."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What one client was given, under Kafka's names. What could not be read is not in it."""

    values: Mapping[str, str]
    where: str
    lines: Mapping[str, int] = field(default_factory=dict[str, int])

    def get(self, name: str) -> str | None:
        return self.values.get(name)

    def whole(self, name: str) -> int | None:
        text = self.values.get(name, "").replace("_", "")
        return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None

    def truth(self, name: str) -> bool | None:
        return {"true": True, "false": False}.get(self.values.get(name, "").lower())

    def place(self, name: str) -> str:
        """Where this setting was written."""
        return f"{self.where}:{self.lines[name]}" if name in self.lines else self.where

    @property
    def names_several_brokers(self) -> bool:
        """Whether one of the clusters that are named has several addresses."""
        named = (value for name, value in self.values.items() if f".{name}".endswith(".bootstrap.servers"))
        return any("," in value.strip(" ,") for value in named)

    @property
    def transactional_id(self) -> str | None:
        return self.values.get("transactional.id")


def read_name(name: str) -> tuple[str, str]:
    """Whose setting it is ("producer", "consumer" or "") and Kafka's name for it.

    >>> read_name("enable_auto_commit"), read_name("spring.kafka.consumer.isolation-level")
    (('', 'enable.auto.commit'), ('consumer', 'isolation.level'))
    """
    lower = name.strip().lower()
    found = _PREFIX.match(lower)
    # "producer.id.expiration.ms" and "consumer.group" are broker's names, and nobody's prefix.
    role, rest = "", lower
    if found is not None and not lower.startswith(("producer.id.", "kafka.bootstrap")):
        role = next((one for one in found.groups() if one), "")
        rest = lower[found.end() :]
    plain = rest.replace("_", ".").replace("-", ".")
    return role, _SAME.get(plain, plain)


def settings_of(given: Mapping[str, object], where: str, lines: Mapping[str, int] | None = None) -> ClientSettings:
    """All of a mapping as one client's settings. A consumer's and a producer's may be together in it."""
    values: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for name, value in given.items():
        if value is None or isinstance(value, Mapping | list | tuple):
            continue
        _, plain = read_name(name)
        values[plain] = str(value).strip()
        if lines and name in lines:
            numbers[plain] = lines[name]
    return ClientSettings(values, where, numbers)


def read_settings_file(path: Path) -> list[ClientSettings]:
    """The clients that a file of settings describes: properties (also spark-defaults.conf), JSON or YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Name a file of settings.") from error
    if path.suffix == ".json":
        return list(_read_json(path, text))
    if path.suffix in _YAML:
        return _read_yaml(path, text)
    return [_read_properties(path, text)]


def _read_properties(path: Path, text: str) -> ClientSettings:
    given = list(_properties(text))
    if not given:
        raise ConfigError(f"{path} has no settings: expected lines such as bootstrap.servers=localhost:9092.")
    return settings_of({name: value for name, value, _ in given}, str(path), {name: line for name, _, line in given})


def _read_yaml(path: Path, text: str) -> list[ClientSettings]:
    """Files that are written out in it, as in a ConfigMap, are read as themselves."""
    read = read_yaml(path, text)
    found = [
        settings_of(one.values, f"{path} ({one.about})" if one.about else str(path), one.lines) for one in read.clients
    ]
    for name, inner in read.texts.items():
        place = Path(f"{path} ({name})")
        if name.endswith(_YAML):
            found += _read_yaml(place, inner)
        elif name.endswith((".properties", ".conf")):
            found.append(_read_properties(place, inner))
    if not found:
        raise ConfigError(f"{path} has no settings: expected a mapping such as a Spring Boot application.yml has.")
    return found


def _read_json(path: Path, text: str) -> Iterator[ClientSettings]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path} must be a JSON object with settings as its members.")
    yield from _nested(given, str(path))


def _nested(given: Mapping[str, Any], where: str) -> Iterator[ClientSettings]:
    """An object of settings; objects in it are clients of their own."""
    own = settings_of(given, where)
    if own.values:
        yield own
    for name, value in given.items():
        if isinstance(value, dict):
            yield from (replace(one, where=f"{where} ({name})") for one in _nested(value, where))


_LINE: Final = re.compile(r"\s*((?:\\.|[^\\=:\s])+)(?:\s*[=:]\s*|\s+|$)(.*)")


def _properties(text: str) -> Iterator[tuple[str, str, int]]:
    """Name, value and line of each property, as Java reads them."""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip()[0] in "#!":
            continue
        whole = line
        while (len(whole) - len(whole.rstrip("\\"))) % 2:
            whole = whole[:-1] + next(lines, (0, ""))[1].lstrip()
        if found := _LINE.fullmatch(whole):
            yield re.sub(r"\\(.)", r"\1", found[1]), found[2].strip(), number
