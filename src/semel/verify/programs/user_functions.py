"""Functions of the user's that the verifier calls: rules between topics, and generators of input."""

from __future__ import annotations

import json
import os
import random
import string
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from semel.errors import ConfigError
from semel.verify.programs.records import Generated, Generator


def load_function(name: str, option: str) -> Callable[..., Any]:
    """`MODULE:FUNCTION`, found from the current folder as `python -m` would find it.

    >>> load_function("json:dumps", "--rule")([1])
    '[1]'
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{option} {name!r} is no function: write MODULE:FUNCTION.")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{option} names the module {module_name!r}, which cannot be imported from {os.getcwd()}: {error}."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{option} names {function_name!r}, which is no function of the module {module_name}.")
    return function


def plain_generator(seed: int, *, keys: int, record_bytes: int) -> Generator:
    """JSON with a unique `id`, a `key` that is the record's key too, an `amount`, and text up to the wanted size.

    >>> key, value, headers = plain_generator(7, keys=3, record_bytes=100)(12)
    >>> json.loads(value)["id"], json.loads(value)["key"] == key.decode()
    (12, True)
    """

    def make(number: int) -> Generated:
        chance = random.Random(f"{seed}/{number}")
        key = f"key-{chance.randrange(keys)}"
        fields = {"id": number, "key": key, "amount": chance.randrange(1, 10_000)}
        missing = record_bytes - len(json.dumps(fields)) - len(', "text": ""')
        if missing > 0:
            fields["text"] = "".join(chance.choices(string.ascii_lowercase, k=missing))
        return key.encode(), json.dumps(fields).encode(), ()

    return make


def checked_generator(generate: Generator) -> Generator:
    """The user's generator, with what it returns brought into one form: key, value and pairs of headers."""

    def make(number: int) -> Generated:
        made = generate(number)
        if not isinstance(made, tuple) or len(made) not in (2, 3):
            raise ConfigError(f"The generator returned {made!r}: return (key, value) or (key, value, headers).")
        key, value, headers = (*made, ())[:3]
        pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
        return _bytes(key), _bytes(value), [(str(name), _bytes(content)) for name, content in pairs]

    return make


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    if value is not None and not isinstance(value, bytes):
        raise ConfigError(f"The generator returned {value!r} in a record: return bytes, str or None.")
    return value
