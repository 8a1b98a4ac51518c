"""A Python file's syntax tree with what the doctor needs to read it: scopes, imports, and what a name was set to."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from semel.errors import ConfigError

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = ast.Module | Function
_DEPTH_MAX = 8
"""How many names may stand for each other; beyond it nothing is known."""


class SourceTree:
    """One file. Nothing of it is ever imported or run."""

    def __init__(self, text: str, where: str) -> None:
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not Python that this interpreter can read: {error}.") from error
        self.where = where
        self._parents: dict[ast.AST, ast.AST] = {
            child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)
        }
        self.nodes = list(ast.walk(self.tree))
        self.imports = dict(self._read_imports())
        self.functions = {
            node.name: node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    @classmethod
    def read(cls, path: Path) -> SourceTree:
        try:
            return cls(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}.") from error

    def place(self, node: ast.AST) -> str:
        return f"{self.where}:{getattr(node, 'lineno', 1)}"

    def _read_imports(self) -> Iterator[tuple[str, str]]:
        """What each imported name stands for."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield (
                        (alias.asname or alias.name.split(".")[0]),
                        (alias.name if alias.asname else alias.name.split(".")[0]),
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"

    # -- around a node ---------------------------------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self._parents:
            node = self._parents[node]
            yield node

    def scope_of(self, node: ast.AST) -> Scope:
        return next((one for one in self.ancestors(node) if isinstance(one, Scope)), self.tree)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((one for one in self.ancestors(node) if isinstance(one, ast.ClassDef)), None)

    def calls(self, within: ast.AST | None = None) -> Iterator[ast.Call]:
        nodes = self.nodes if within is None else ast.walk(within)
        return (node for node in nodes if isinstance(node, ast.Call))

    # -- what a name means -----------------------------------------------------------------------------------------

    def dotted(self, node: ast.AST) -> str:
        """The full name of what a name or attribute stands for, by the imports; "" if it is none."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""

    def value_of(self, node: ast.expr, depth: int = 0) -> ast.expr:
        """What a name or `self.name` was set to, if that is certain: it was set in one place only."""
        if depth > _DEPTH_MAX or not isinstance(node, ast.Name | ast.Attribute):
            return node
        values = self.assigned(node)
        return self.value_of(values[0], depth + 1) if len(values) == 1 else node

    def assigned(self, node: ast.Name | ast.Attribute) -> list[ast.expr]:
        """All that is assigned to a name in its scope or, if nothing is there, in the module."""
        if isinstance(node, ast.Attribute):
            around = self.class_of(node)
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            return list(self._set_within(around, node)) if around is not None and is_own else []
        scope = self.scope_of(node)
        if not isinstance(scope, ast.Module):
            if node.id in _parameters(scope):
                return []
            if found := list(self._set_within(scope, node)):
                return found
        return list(self._set_within(self.tree, node, only_module=True))

    def _set_within(
        self, around: ast.AST, name: ast.Name | ast.Attribute, only_module: bool = False
    ) -> Iterator[ast.expr]:
        wanted = ast.unparse(name)
        for node in ast.walk(around):
            for target, value in _bindings(node):
                is_here = not only_module or isinstance(self.scope_of(node), ast.Module)
                if is_here and ast.unparse(target) == wanted:
                    yield value

    def text_of(self, node: ast.expr) -> str | None:
        """The text that an expression is, if it is written down."""
        value = self.value_of(node)
        if isinstance(value, ast.Constant) and isinstance(value.value, str | int | float | bool):
            return str(value.value)
        if isinstance(value, ast.JoinedStr) and value.values and isinstance(value.values[0], ast.Constant):
            return None
        return None

    def callee(self, call: ast.Call) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The function or method of this file that is called."""
        function = call.func
        if isinstance(function, ast.Name):
            return self.functions.get(function.id)
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
            around = self.class_of(call)
            return next((one for one in _methods(around) if one.name == function.attr), None)
        return None


def _parameters(function: Function) -> set[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {one.arg for one in (*every, arguments.vararg, arguments.kwarg) if one is not None}


def _methods(around: ast.ClassDef | None) -> Iterable[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [one for one in around.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)] if around else []


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pairs of what is set and what it is set to; the value of `with ... as` and `for` counts as its expression."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        yield node.target, node.value
        yield node.target, node.target  # set twice, so that nothing is certain
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield node.target, node.iter
