"""Settings in YAML, as Spring Boot, Strimzi, Kubernetes and Kafka Connect have them, with the line of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from semel.errors import ConfigError

Node = Any
"""One of PyYAML's, whose types do not say that each has an `id`: mapping, sequence or scalar."""

_SETTINGS_MAX: Final = 10_000
"""Aliases of aliases can make a small file endless."""
_TRUE: Final = ("true", "yes", "on")


@dataclass(slots=True)
class YamlClient:
    """What stands together in a file: the settings of one client, as text, and the line of each."""

    about: str = ""
    values: dict[str, str] = field(default_factory=dict[str, str])
    lines: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The clients of a file, and the files that are written out in it, as in a ConfigMap of Kubernetes."""

    clients: list[YamlClient]
    texts: dict[str, str]


def read_yaml(path: Path, text: str) -> YamlFile:
    """Each document describes a client, or several in mappings named `config`."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{path} is YAML, which takes PyYAML to read. Install it: pip install 'semel[yaml]'"
        ) from None
    try:
        documents = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    clients, texts = list[YamlClient](), dict[str, str]()
    for document in documents:
        members = _members(document)
        if "apiVersion" in members and "kind" in members:
            clients += _of_kubernetes(members)
            texts |= dict(_written_out(members))
        else:
            clients.append(_client(members.get("config", document), ""))
    return YamlFile([one for one in clients if one.values], texts)


def _of_kubernetes(members: Mapping[str, Node]) -> Iterator[YamlClient]:
    """What Strimzi's resources hand on to Kafka, its clients and Connect: `config`, wherever in the specification."""
    kind = _text(members["kind"])
    bootstrap = _members(members.get("spec")).get("bootstrapServers")
    for place, node in _configs(members.get("spec"), "spec", depth=0):
        found = _client(node, f"{kind} {place}")
        if bootstrap is not None:
            found.values.setdefault("bootstrap.servers", _text(bootstrap))
        yield found


def _configs(node: Node, place: str, depth: int) -> Iterator[tuple[str, Node]]:
    for name, value in _members(node).items():
        if name == "config" and _members(value):
            yield f"{place}.config", value
        elif depth < 5:
            yield from _configs(value, f"{place}.{name}", depth + 1)


def _written_out(members: Mapping[str, Node]) -> Iterator[tuple[str, str]]:
    if _text(members["kind"]) in ("ConfigMap", "Secret"):
        for block in ("data", "stringData"):
            for name, value in _members(members.get(block)).items():
                yield name, _text(value)


def _client(node: Node, about: str) -> YamlClient:
    """Every value by its whole name: `spring.kafka.producer.acks`."""
    found = YamlClient(about)
    for name, value, line in _flatten(node, ""):
        if len(found.values) >= _SETTINGS_MAX:
            raise ConfigError(
                f"There are over {_SETTINGS_MAX:,} settings in one document of YAML: nothing was checked."
            )
        found.values[name], found.lines[name] = value, line
    return found


def _flatten(node: Node, before: str, depth: int = 0) -> Iterator[tuple[str, str, int]]:
    if depth > 50:  # an alias of what it stands in
        return
    for name, value in _members(node).items():
        whole = f"{before}.{name}" if before else name
        if value.id == "mapping":
            yield from _flatten(value, whole, depth + 1)
        elif value.id == "sequence":
            yield whole, ",".join(_text(one) for one in value.value), value.start_mark.line + 1
        elif not value.tag.endswith(":null"):
            yield whole, _text(value), value.start_mark.line + 1


def _members(node: Node) -> dict[str, Node]:
    """By name; Spring writes names with dots in brackets. `<<` brings the members of another mapping."""
    if node is None or node.id != "mapping":
        return {}
    found: dict[str, Node] = {}
    for key, value in node.value:
        if key.tag.endswith(":merge"):
            merged = value.value if value.id == "sequence" else [value]
            for one in merged:
                found = {**_members(one), **found}
        else:
            found[_text(key).removeprefix("[").removesuffix("]")] = value
    return found


def _text(node: Node) -> str:
    """
    >>> import yaml
    >>> _text(yaml.compose("yes")), _text(yaml.compose("60_000"))
    ('true', '60_000')
    """
    if node.id != "scalar":
        return ""
    if node.tag.endswith(":bool"):
        return "true" if node.value.lower() in _TRUE else "false"
    return node.value
