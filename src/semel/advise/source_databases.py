"""Calls of a Python file that certainly write to a database."""

from __future__ import annotations

import ast
import re
from typing import Final

from semel.advise.source_tree import SourceTree

_LIBRARIES: Final = frozenset(
    {
        "psycopg",
        "psycopg2",
        "sqlite3",
        "sqlalchemy",
        "sqlmodel",
        "asyncpg",
        "aiosqlite",
        "pymysql",
        "MySQLdb",
        "mysql",
        "aiomysql",
        "pyodbc",
        "oracledb",
        "duckdb",
        "django",
        "flask_sqlalchemy",
    }
)
_WRITES: Final = re.compile(r"\s*(?:WITH\b.*\b)?(?:INSERT|UPDATE|DELETE|MERGE|REPLACE|UPSERT|COPY|CALL)\b", re.I | re.S)
_RUNS: Final = ("execute", "executemany", "executescript", "exec_driver_sql", "copy")
_STATEMENTS: Final = (
    "sqlalchemy.insert",
    "sqlalchemy.update",
    "sqlalchemy.delete",
    "sqlalchemy.dialects.postgresql.insert",
)
_SESSION_CALLS: Final = ("add", "add_all", "merge", "bulk_save_objects", "bulk_insert_mappings")
_SESSIONS: Final = ("sqlalchemy.orm.Session", "sqlmodel.Session", "sqlalchemy.ext.asyncio.AsyncSession")
_MAKERS: Final = (
    "sqlalchemy.orm.sessionmaker",
    "sqlalchemy.ext.asyncio.async_sessionmaker",
    "sqlalchemy.orm.scoped_session",
)
_DEPTH_MAX: Final = 4


def uses_database(source: SourceTree) -> bool:
    """Whether a file imports anything of a database."""
    return any(name.split(".")[0] in _LIBRARIES for name in source.imports.values())


def find_write(source: SourceTree, call: ast.Call, depth: int = 0) -> ast.Call | None:
    """The database write that a call is, or that a function of this file makes for it."""
    if _is_write(source, call):
        return call
    function = source.callee(call)
    if function is None or depth >= _DEPTH_MAX:
        return None
    inner = (node for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Call))
    return next((found for one in inner if (found := find_write(source, one, depth + 1)) is not None), None)


def _is_write(source: SourceTree, call: ast.Call) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in _RUNS:
        statement = source.value_of(call.args[0]) if call.args else None
        return statement is not None and _is_writing_statement(source, statement)
    return function.attr in _SESSION_CALLS and _is_orm_session(source, function.value)


def _is_writing_statement(source: SourceTree, node: ast.expr) -> bool:
    """SQL text that changes rows, or SQLAlchemy's insert, update and delete."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    if isinstance(node, ast.BinOp):
        return _is_writing_statement(source, source.value_of(node.left))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(_WRITES.match(node.value))
    if isinstance(node, ast.Call):
        name = source.dotted(node.func)
        if name in _STATEMENTS:
            return True
        if name.rpartition(".")[2] in ("text", "SQL", "format") and node.args:
            return _is_writing_statement(source, source.value_of(node.args[0]))
        if isinstance(node.func, ast.Attribute):  # insert(table).values(...), table.insert().values(...)
            owner = node.func.value
            is_table = node.func.attr in ("insert", "update", "delete") and _is_table(source, owner)
            return is_table or _is_writing_statement(source, source.value_of(owner))
    return False


def _is_table(source: SourceTree, node: ast.expr) -> bool:
    value = source.value_of(node)
    return isinstance(value, ast.Call) and source.dotted(value.func) == "sqlalchemy.Table"


def _is_orm_session(source: SourceTree, node: ast.expr) -> bool:
    value = source.value_of(node)
    if isinstance(value, ast.Attribute):  # Flask's `db.session`
        maker = source.value_of(value.value)
        is_flask = isinstance(maker, ast.Call) and source.dotted(maker.func) == "flask_sqlalchemy.SQLAlchemy"
        return value.attr == "session" and is_flask
    if not isinstance(value, ast.Call):
        return False
    if source.dotted(value.func) in _SESSIONS:
        return True
    owner = value.func.value if isinstance(value.func, ast.Attribute) and value.func.attr == "begin" else value.func
    made = source.value_of(owner) if isinstance(owner, ast.Name | ast.Attribute) else owner
    return isinstance(made, ast.Call) and source.dotted(made.func) in _MAKERS
