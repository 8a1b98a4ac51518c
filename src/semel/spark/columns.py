"""Which columns of a DataFrame become records, checked before anything runs. As in Spark's Kafka connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_BYTES: Final = ("string", "binary")
_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "value": _BYTES,
    "key": _BYTES,
    "topic": ("string",),
    "partition": ("int",),
    "headers": ("array<struct<key:string,value:binary>>",),
}


def record_columns(schema: StructType, topic: str | None) -> list[str]:
    """The names of the columns to write; `ConfigError` if one is missing or has a type that cannot be written."""
    types: dict[str, str] = {}
    for field in schema.fields:
        name = field.name.lower()
        if name in types and name in _TYPES:
            raise ConfigError(f"The DataFrame has the column `{name}` twice; nothing was written. Rename one of them.")
        types[name] = _type_name(field.dataType)
    if "value" not in types:
        raise ConfigError(
            f"The DataFrame has no column `value`, only {', '.join(types) or 'none'}; nothing was written. Make one, "
            "for instance by to_json(struct('*')).alias('value')."
        )
    if topic is None and "topic" not in types:
        raise ConfigError(
            "No topic was given and the DataFrame has no column `topic`; nothing was written. Pass topic=, or add one."
        )
    if topic is None and "offset" in types:
        raise ConfigError(
            "The DataFrame still has the columns of Kafka's source, so `topic` says where rows came from, and they "
            "would go back there; nothing was written. Pass topic=, or select the columns to write."
        )
    for name, allowed in _TYPES.items():
        if name in types and types[name] not in allowed:
            raise ConfigError(
                f"The column `{name}` has the type {types[name]} and must be {' or '.join(allowed)}; nothing was "
                "written. Cast it."
            )
    wanted = [name for name in _TYPES if name in types]
    return [name for name in wanted if name != "topic" or topic is None]


def _type_name(kind: Any) -> str:
    return str(kind.simpleString()).split(" collate ")[0]
