"""Spark programs: sinks that repeat, checkpoints, and options of the Kafka source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from semel.advise.client_settings import settings_of
from semel.advise.rules import Finding, finding
from semel.advise.settings_check import check_checkpoint
from semel.advise.source_tree import Function, SourceTree

_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"
_REPEATING_MODES: Final = ("append", None)


def check_spark(source: SourceTree) -> Iterator[Finding]:
    """What is wrong in a file's use of Spark."""
    if not any(name.split(".")[0] in ("pyspark", "delta", "semel") for name in source.imports.values()):
        return
    has_manager = any(isinstance(node, ast.Constant) and node.value == _MANAGER for node in source.nodes)
    for call in source.calls():
        yield from _check_chain(source, call, has_manager)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "foreachBatch" and call.args:
            yield from _check_batch_function(source, call.args[0])
        if source.dotted(call.func) == "semel.write_stream":
            for keyword in call.keywords:
                if keyword.arg == "checkpoint" and (text := _text_start(source, keyword.value)):
                    yield from check_checkpoint(text, source.place(keyword.value), has_manager)


def _check_chain(source: SourceTree, call: ast.Call, has_manager: bool) -> Iterator[Finding]:
    """One call chain on readStream or writeStream, looked at from its last call."""
    parent = next(source.ancestors(call), None)
    if not isinstance(call.func, ast.Attribute) or isinstance(parent, ast.Attribute):
        return
    links, start = _chain(call)
    if start not in ("readStream", "writeStream"):
        return
    options = _options(source, links)
    for name, value in options.items():
        if name.lower() == "checkpointlocation" and (text := _text_start(source, value)):
            yield from check_checkpoint(text, source.place(value), has_manager)
        if name.lower() == "failondataloss" and (source.text_of(value) or "").lower() == "false":
            settings = settings_of({"failOnDataLoss": "false"}, source.where)
            yield finding("data-loss-accepted", source.place(value), f"failOnDataLoss={settings.get('failondataloss')}")
    if start == "writeStream" and _format(source, links) == "kafka":
        yield finding("spark-kafka-sink-repeats", source.place(call), 'writeStream.format("kafka")')


def _chain(call: ast.Call) -> tuple[list[ast.Call], str]:
    """The calls of `a.writeStream.b(...).c(...)`, the last first, and the attribute that they begin at."""
    links: list[ast.Call] = []
    node: ast.AST = call
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        links.append(node)
        node = node.func.value
    return links, node.attr if isinstance(node, ast.Attribute) else ""


def _options(source: SourceTree, links: list[ast.Call]) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for link in reversed(links):
        name = link.func.attr if isinstance(link.func, ast.Attribute) else ""
        if name == "option" and len(link.args) == 2 and (key := source.text_of(link.args[0])):
            found[key] = link.args[1]
        elif name in ("options", "start", "save"):
            found.update({one.arg: one.value for one in link.keywords if one.arg})
            for one in link.keywords:
                mapping = source.value_of(one.value) if one.arg is None else None
                if isinstance(mapping, ast.Dict):
                    found.update(
                        {
                            key: value
                            for node, value in zip(mapping.keys, mapping.values, strict=True)
                            if node is not None and (key := source.text_of(node))
                        }
                    )
    return found


def _format(source: SourceTree, links: list[ast.Call]) -> str | None:
    for link in links:
        if isinstance(link.func, ast.Attribute) and link.func.attr == "format" and link.args:
            return source.text_of(link.args[0])
    given = _options(source, links).get("format")
    return None if given is None else source.text_of(given)


def _text_start(source: SourceTree, node: ast.expr) -> str | None:
    """A text, or what is certain of its beginning."""
    value = source.value_of(node)
    if isinstance(value, ast.JoinedStr) and value.values and isinstance(value.values[0], ast.Constant):
        return f"{value.values[0].value}..."
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _text_start(source, value.left)
    return source.text_of(value)


# -- foreachBatch --------------------------------------------------------------------------------------------------


def _check_batch_function(source: SourceTree, node: ast.expr) -> Iterator[Finding]:
    function: Function | None = node if isinstance(node, ast.Lambda) else None
    if isinstance(node, ast.Name):
        function = source.functions.get(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        around = source.class_of(node)
        function = next(
            (one for one in around.body if isinstance(one, ast.FunctionDef) and one.name == node.attr)
            if around
            else iter(()),
            None,
        )
    if function is None or _looks_at_the_batch_id(source, function):
        return
    for call in source.calls(function):
        if what := _repeating_write(source, call):
            yield finding("foreach-batch-repeats", source.place(call), what)


def _looks_at_the_batch_id(source: SourceTree, function: Function) -> bool:
    """A function that uses the id for more than messages may recognise a batch itself."""
    names = [one.arg for one in function.args.args if one.arg not in ("self", "cls")]
    if len(names) < 2:
        return False
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == names[1] and not _is_only_told(source, node, function):
            return True
    return False


def _is_only_told(source: SourceTree, node: ast.AST, function: Function) -> bool:
    for parent in source.ancestors(node):
        if parent is function:
            return False
        if isinstance(parent, ast.Call):
            name = source.dotted(parent.func) or getattr(parent.func, "attr", "")
            if name == "print" or name.rpartition(".")[2] in ("debug", "info", "warning", "error", "exception", "log"):
                return True
    return False


def _repeating_write(source: SourceTree, call: ast.Call) -> str | None:
    """Spark's plain Kafka sink, or an append by JDBC."""
    parent = next(source.ancestors(call), None)
    if not isinstance(call.func, ast.Attribute) or isinstance(parent, ast.Attribute):
        return None
    links, start = _chain(call)
    last = call.func.attr
    if start != "write" or last not in ("save", "jdbc"):
        return None
    kind = "jdbc" if last == "jdbc" else _format(source, links)
    if kind == "kafka":
        return 'write.format("kafka") in a foreachBatch function'
    if kind == "jdbc" and _mode(source, call, links) in _REPEATING_MODES[:1]:
        return "an append by JDBC in a foreachBatch function"
    return None


def _mode(source: SourceTree, call: ast.Call, links: list[ast.Call]) -> str | None:
    given = next((one.value for one in call.keywords if one.arg == "mode"), None)
    for link in links:
        if isinstance(link.func, ast.Attribute) and link.func.attr == "mode" and link.args:
            given = link.args[0]
    text = None if given is None else source.text_of(given)
    return None if text is None else text.lower()
