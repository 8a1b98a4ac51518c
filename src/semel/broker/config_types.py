"""One Kafka config: name, type, default and rules; from text to a value and back, with Kafka's words for mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from semel.errors import ConfigError

LONG_MAX: Final = 2**63 - 1
INT_MAX: Final = 2**31 - 1

# No 64-bit number needs as many digits, and Python refuses to read thousands of them.
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,40}")
_DECIMAL: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_COMMA: Final = re.compile(r"\s*,\s*")

Value = Any
"""A parsed config: bool, int, float, str, a tuple of str, or None where nothing is set."""


class ConfigType(IntEnum):
    """The types of a config, by their numbers in DescribeConfigs."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7


_INTEGER_BITS: Final = {ConfigType.SHORT: 16, ConfigType.INT: 32, ConfigType.LONG: 64}


class InvalidConfig(ConfigError):
    """A config that cannot be taken, in Kafka's words: the start-up fails with it, a request is answered with it."""


Check = Callable[[str, Value], str | None]
"""Takes name and value; what is wrong with them, or None."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """What is known of one config.

    `is_dynamic` tells, for a broker's config, that it can be changed while the broker runs. `synonyms` are the broker
    configs that give a topic config (or a broker config such as `log.retention.ms`) its value when it is not set
    itself, the strongest first, each with the factor that brings it to this config's unit.
    """

    name: str
    type: ConfigType
    default: Value
    check: Check | None = None
    is_dynamic: bool = False
    is_hidden: bool = False
    synonyms: tuple[tuple[str, int], ...] = ()

    def parse(self, text: str) -> Value:
        """The value that `text` stands for, checked.

        >>> ConfigKey("retention.ms", ConfigType.LONG, 1, at_least(-1)).parse(" 1000 ")
        1000
        >>> ConfigKey("flush.ms", ConfigType.LONG, 1, at_least(0)).parse("-5")
        Traceback (most recent call last):
        semel.broker.config_types.InvalidConfig: Invalid value -5 for configuration flush.ms: Value must be at least 0
        """
        value = self._read(text.strip())
        complaint = self.check(self.name, value) if self.check is not None else None
        if complaint is not None:
            raise InvalidConfig(complaint)
        return value

    def _read(self, text: str) -> Value:
        if self.type is ConfigType.BOOLEAN:
            if text.lower() not in ("true", "false"):
                raise InvalidConfig(invalid(self.name, text, "Expected value to be either true or false"))
            return text.lower() == "true"
        if self.type in _INTEGER_BITS:
            limit = 1 << (_INTEGER_BITS[self.type] - 1)
            if not _INTEGER.fullmatch(text) or not -limit <= int(text) < limit:
                raise InvalidConfig(invalid(self.name, text, f"Not a number of type {self.type.name}"))
            return int(text)
        if self.type is ConfigType.DOUBLE:
            if not _DECIMAL.fullmatch(text):
                raise InvalidConfig(invalid(self.name, text, "Not a number of type DOUBLE"))
            return float(text)
        if self.type is ConfigType.LIST:
            return tuple(_COMMA.split(text)) if text else ()
        return text


def is_integer(text: str) -> bool:
    """Whether a client's text is a whole number that can be read.

    >>> is_integer("-1"), is_integer("--1"), is_integer("9" * 5000)
    (True, False, False)
    """
    return _INTEGER.fullmatch(text) is not None


def render(value: Value) -> str | None:
    """A value as Kafka writes it.

    >>> render(True), render(("compact", "delete")), render(0.5), render(None)
    ('true', 'compact,delete', '0.5', None)
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple | list) else str(value)


def invalid(name: str, value: Value, reason: str) -> str:
    """Kafka's sentence about a wrong value."""
    return f"Invalid value {render(value)} for configuration {name}: {reason}"


# -- rules -------------------------------------------------------------------------------------------------------------


def at_least(lowest: float) -> Check:
    def check(name: str, value: Value) -> str | None:
        return None if value >= lowest else invalid(name, value, f"Value must be at least {lowest}")

    return check


def between(lowest: float, highest: float) -> Check:
    def check(name: str, value: Value) -> str | None:
        if value < lowest:
            return invalid(name, value, f"Value must be at least {lowest}")
        return None if value <= highest else invalid(name, value, f"Value must be no more than {highest}")

    return check


def one_of(*allowed: str, ignore_case: bool = False) -> Check:
    wanted = {word.lower() for word in allowed} if ignore_case else set(allowed)
    prefix = "String must be one of (case insensitive): " if ignore_case else "String must be one of: "

    def check(name: str, value: Value) -> str | None:
        given = value.lower() if ignore_case else value
        return None if given in wanted else invalid(name, value, prefix + ", ".join(allowed))

    return check


def each_of(*allowed: str, may_be_empty: bool = True) -> Check:
    """A list of these words, none of them twice."""

    def check(name: str, value: Sequence[str]) -> str | None:
        if not value and not may_be_empty:
            return f"Configuration '{name}' must not be empty. Valid values include: [{', '.join(allowed)}]"
        if len(set(value)) < len(value):
            return f"Configuration '{name}' values must not be duplicated."
        wrong = [word for word in value if word not in allowed]
        return invalid(name, wrong[0], "String must be one of: " + ", ".join(allowed)) if wrong else None

    return check


def gzip_level(name: str, value: Value) -> str | None:
    if value == -1 or 1 <= value <= 9:
        return None
    return invalid(name, value, "Value must be between 1 and 9 or equal to -1")


def throttled_replicas(name: str, value: Sequence[str]) -> str | None:
    if not value or tuple(value) == ("*",) or all(re.fullmatch(r"[0-9]+:[0-9]+", word) for word in value):
        return None
    form = "the literal '*' or a list of replicas in the following format: [partitionId]:[brokerId],..."
    return f"Invalid value [{', '.join(value)}] for configuration {name}: {name} must be {form}"
