"""Which statements of a Python file run inside a Kafka transaction."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from semel.advise.source_tree import SourceTree

_ENDS: Final = ("commit_transaction", "abort_transaction")


@dataclass(frozen=True, slots=True)
class Region:
    """Statements inside one transaction, and the call or block that opens it."""

    opened: ast.AST
    statements: tuple[ast.AST, ...]


def regions(source: SourceTree) -> Iterator[Region]:
    """Each Kafka transaction of a file, of whichever client."""
    yield from _between_calls(source)
    yield from _blocks(source)
    yield from _functions_of_run(source)


def _between_calls(source: SourceTree) -> Iterator[Region]:
    """From `x.begin_transaction()` to `x.commit_transaction()` in the same function."""
    for call in source.calls():
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "begin_transaction":
            continue
        owner = ast.unparse(call.func.value)
        scope = source.scope_of(call)
        ends = [
            node
            for node in source.calls(scope)
            if isinstance(node.func, ast.Attribute)
            and node.func.attr == "commit_transaction"
            and ast.unparse(node.func.value) == owner
            and _position(node) > _position(call)
        ]
        if not ends:
            continue  # the transaction ends somewhere else, and so nothing is certain
        end = min(map(_position, ends))
        inside = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.Call)
            and _position(call) < _position(node) < end
            and source.scope_of(node) is scope
            and not _is_after_abort(source, node, owner, scope)
        ]
        yield Region(call, tuple(inside))


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _is_after_abort(source: SourceTree, node: ast.AST, owner: str, scope: ast.AST) -> bool:
    """Whether an earlier statement of a block around it has ended the transaction, or it is an error's handler."""
    child = node
    for parent in source.ancestors(node):
        if isinstance(parent, ast.ExceptHandler):
            return True  # what a handler does is after the failure, and mostly after the abort
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and child in block:
                for before in block[: block.index(child)]:
                    if isinstance(before, ast.Expr | ast.Assign) and _ends_transaction(before, owner):
                        return True
        if parent is scope:
            return False
        child = parent
    return False


def _ends_transaction(statement: ast.stmt, owner: str) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _ENDS
        and ast.unparse(node.func.value) == owner
        for node in ast.walk(statement)
    )


def _blocks(source: SourceTree) -> Iterator[Region]:
    """`with producer.transaction():` of aiokafka and Semel, and Semel's `for transaction in session:`."""
    kafka = {"aiokafka", "semel"} & {name.split(".")[0] for name in source.imports.values()}
    if not kafka:
        return
    for node in source.nodes:
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if _is_transaction(source, item.context_expr):
                    yield Region(node, tuple(_calls_in(node.body)))
        elif isinstance(node, ast.For | ast.AsyncFor) and _is_a(source, node.iter, ("semel.Session",)):
            yield Region(node, tuple(_calls_in(node.body)))


_OWNERS: Final = ("aiokafka.AIOKafkaProducer", "semel.Producer", "semel.Session")


def _is_transaction(source: SourceTree, node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "transaction"
        and _is_a(source, node.func.value, _OWNERS)
    )


def _is_a(source: SourceTree, node: ast.expr, kinds: tuple[str, ...]) -> bool:
    """Whether an expression is certainly an object of one of these classes."""
    value = source.value_of(node)
    return isinstance(value, ast.Call) and source.dotted(value.func) in kinds


def _calls_in(body: list[ast.stmt]) -> Iterator[ast.Call]:
    """The calls of a block, without those in functions that are only defined there."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.Call))


def _functions_of_run(source: SourceTree) -> Iterator[Region]:
    """The function of `semel.run(f, to="topic")`: it is called again after each abort."""
    for call in source.calls():
        if source.dotted(call.func) != "semel.run" or not call.args:
            continue
        to = next((one.value for one in call.keywords if one.arg == "to"), None)
        if to is not None and source.text_of(to) is None:
            continue  # a database target, whose own transaction is another matter
        function = call.args[0]
        if isinstance(function, ast.Name) and function.id in source.functions:
            yield Region(call, tuple(_calls_in(source.functions[function.id].body)))
