"""Requests of any API and version with something in every field, made from the shape of the messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

from kio.index import load_request_schema
from kio.schema.errors import ErrorCode

from semel.wire.api import Api
from semel.wire.shape import nested_entity

_SAMPLES: dict[str, Any] = {"bool": True, "bytes": b"bytes", "uuid": UUID(int=7), "records": b""}


def sample_request(api: Api, version: int) -> Any:
    return _sample(load_request_schema(api, version), 0)


def _sample(entity: Any, number: int) -> Any:
    return entity(**{field.name: _value(field, number) for field in dataclasses.fields(entity)})


def _value(field: dataclasses.Field[Any], number: int) -> Any:
    nested = nested_entity(field.type)
    kind = field.metadata.get("kafka_type", "")
    if "tuple" in str(field.type):
        return tuple(_sample(nested, at) if nested else _scalar(kind, at) for at in range(2))
    return _sample(nested, number) if nested else _scalar(kind, number)


def _scalar(kind: str, number: int) -> Any:
    if kind == "string":
        return f"name-{number}"
    if kind.startswith("timedelta"):
        return timedelta(seconds=1)
    return _SAMPLES.get(kind, 3 + number)


def codes_in(entity: Any) -> Iterator[ErrorCode]:
    """Every error code in a message, wherever it stands."""
    for value in _values(entity):
        if isinstance(value, ErrorCode):
            yield value


def names_in(entity: Any) -> set[str]:
    """Every text in a message."""
    return {value for value in _values(entity) if isinstance(value, str)}


def _values(entity: Any) -> Iterator[Any]:
    if isinstance(entity, tuple):
        for item in entity:
            yield from _values(item)
    elif dataclasses.is_dataclass(entity):
        for field in dataclasses.fields(entity):
            yield from _values(getattr(entity, field.name))
    else:
        yield entity
