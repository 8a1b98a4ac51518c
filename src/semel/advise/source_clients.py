"""Kafka clients that a Python file makes, and the settings that can be read from its text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from semel.advise.client_settings import ClientSettings, read_name
from semel.advise.source_tree import Scope, SourceTree

Library = Literal["confluent-kafka", "kafka-python", "aiokafka", "semel"]
Role = Literal["producer", "consumer", "both"]

_CONSTRUCTORS: Final[dict[str, tuple[Library, Role]]] = {
    "confluent_kafka.Producer": ("confluent-kafka", "producer"),
    "confluent_kafka.SerializingProducer": ("confluent-kafka", "producer"),
    "confluent_kafka.Consumer": ("confluent-kafka", "consumer"),
    "confluent_kafka.DeserializingConsumer": ("confluent-kafka", "consumer"),
    "kafka.KafkaProducer": ("kafka-python", "producer"),
    "kafka.producer.KafkaProducer": ("kafka-python", "producer"),
    "kafka.KafkaConsumer": ("kafka-python", "consumer"),
    "kafka.consumer.KafkaConsumer": ("kafka-python", "consumer"),
    "aiokafka.AIOKafkaProducer": ("aiokafka", "producer"),
    "aiokafka.AIOKafkaConsumer": ("aiokafka", "consumer"),
    "semel.Producer": ("semel", "producer"),
    "semel.Fetcher": ("semel", "consumer"),
    "semel.Session": ("semel", "both"),
}


@dataclass(frozen=True, slots=True)
class Client:
    """A client that is made somewhere in a file."""

    library: Library
    role: Role
    call: ast.Call
    expressions: dict[str, ast.expr]
    """The settings by Kafka's names, as they are written."""
    is_complete: bool
    """False if more settings may come from elsewhere."""
    settings: ClientSettings


def clients(source: SourceTree) -> list[Client]:
    """All clients of a file, in the order of its lines."""
    found = [
        _client(source, call, *_CONSTRUCTORS[name])
        for call in source.calls()
        if (name := source.dotted(call.func)) in _CONSTRUCTORS
    ]
    return sorted(found, key=lambda one: one.call.lineno)


def _client(source: SourceTree, call: ast.Call, library: Library, role: Role) -> Client:
    entries: dict[str, ast.expr] = {}
    is_complete = True
    takes_mapping = library in ("confluent-kafka", "semel")
    for argument in call.args[:1] if takes_mapping else []:
        is_complete &= _read_mapping(source, argument, entries)
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg == "settings":
            is_complete &= _read_mapping(source, keyword.value, entries)
        else:
            entries[keyword.arg] = keyword.value
    expressions = {read_name(name)[1]: value for name, value in entries.items()}
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    for name, value in expressions.items():
        lines[name] = value.lineno
        text = source.text_of(value)
        if text is not None:
            values[name] = text
    return Client(library, role, call, expressions, is_complete, ClientSettings(values, source.where, lines))


def _read_mapping(source: SourceTree, node: ast.expr, entries: dict[str, ast.expr], depth: int = 0) -> bool:
    """Add what a mapping holds to `entries`; False if it may hold more."""
    if depth > 4:
        return False
    if isinstance(node, ast.Name | ast.Attribute):
        values = source.assigned(node)
        if len(values) != 1:
            return False
        return _read_mapping(source, values[0], entries, depth + 1) & _read_additions(source, node, entries, depth)
    if isinstance(node, ast.Dict):
        is_complete = True
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                is_complete &= _read_mapping(source, value, entries, depth + 1)
            elif (name := source.text_of(key)) is not None:
                entries[name] = value
            else:
                is_complete = False
        return is_complete
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = [_read_mapping(source, side, entries, depth + 1) for side in (node.left, node.right)]
        return all(sides)
    if isinstance(node, ast.Call) and source.dotted(node.func) == "dict":
        parts = [_read_mapping(source, one, entries, depth + 1) for one in node.args]
        for keyword in node.keywords:
            if keyword.arg is None:
                parts.append(_read_mapping(source, keyword.value, entries, depth + 1))
            else:
                entries[keyword.arg] = keyword.value
        return all(parts)
    return False


def _read_additions(
    source: SourceTree, name: ast.Name | ast.Attribute, entries: dict[str, ast.expr], depth: int
) -> bool:
    """`conf["acks"] = "all"` and `conf.update({...})` in the scope of the name."""
    text, scope = ast.unparse(name), source.scope_of(name)
    is_complete = True
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            key = source.text_of(target.slice)
            if ast.unparse(target.value) == text:
                if key is None:
                    is_complete = False
                else:
                    entries[key] = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{text}.update":
            for argument in node.args:
                is_complete &= _read_mapping(source, argument, entries, depth + 1)
            entries.update({one.arg: one.value for one in node.keywords if one.arg})
    return is_complete


# -- what an expression depends on ---------------------------------------------------------------------------------

_CHANGES: Final = re.compile(
    r"uuid\.uuid[146]|os\.getpid|os\.urandom|time\.(?:time|time_ns|monotonic|monotonic_ns|perf_counter)"
    r"|random\.\w+|secrets\.\w+|(?:datetime\.)+(?:now|utcnow|today)|threading\.get_ident|tempfile\.\w+"
    r"|numpy\.random\.\w+|(?:uuid\.)?uuid[146]|getpid"
)


def changes_at_each_start(source: SourceTree, node: ast.expr, depth: int = 0) -> str | None:
    """The part of an expression that is another one in each process, as it is written."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and _CHANGES.fullmatch(source.dotted(part.func)):
            return ast.unparse(part)
        if isinstance(part, ast.Attribute) and part.attr == "pid" and isinstance(part.value, ast.Call):
            return ast.unparse(part)
        if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Load) and depth < 4:
            value = source.value_of(part)
            if value is not part and (found := changes_at_each_start(source, value, depth + 1)):
                return found
    return None


def is_made_several_times(source: SourceTree, call: ast.Call) -> str | None:
    """How a call is certainly made more than once at the same time: in a comprehension, or by several workers."""
    function: Scope = source.scope_of(call)
    for one in source.ancestors(call):
        if isinstance(one, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            return "made in a comprehension"
        if one is function:
            break
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return next(_started_by_several(source, function.name), None)
    return None


_WORKERS: Final = ("threading.Thread", "multiprocessing.Process", "multiprocessing.context.Process")


def _started_by_several(source: SourceTree, name: str) -> Iterator[str]:
    for call in source.calls():
        target = next((one.value for one in call.keywords if one.arg == "target"), None)
        is_worker = source.dotted(call.func) in _WORKERS and isinstance(target, ast.Name) and target.id == name
        if is_worker and any(
            isinstance(one, ast.For | ast.ListComp | ast.GeneratorExp | ast.SetComp) for one in source.ancestors(call)
        ):
            yield f"made by each of several workers (line {call.lineno})"
