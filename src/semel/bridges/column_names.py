"""Column names of rows and of a table that differ by case, or by a letter. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from semel.errors import ConfigError


def other_case(name: str, table: Collection[str]) -> str:
    """A sentence if the table has the same name in another case; otherwise nothing.

    >>> other_case("ID", ["id", "at"])
    " The table has 'id': names must agree in upper and lower case."
    """
    found = next((one for one in table if one.lower() == name.lower()), None)
    return "" if found is None else f" The table has {found!r}: names must agree in upper and lower case."


def check_some_in_common(rows: Collection[str], table_name: str, table: Collection[str]) -> None:
    """Raise if the table has none of the rows' columns, so that there is nothing to write."""
    if not set(rows) & set(table):
        hint = next((text for text in (other_case(name, table) for name in rows) if text), "")
        raise ConfigError(
            f"Table {table_name!r} has none of the rows' columns ({', '.join(rows)}); it has {', '.join(table)}. "
            f"Nothing was written.{hint}"
        )


def check_addable(name: str, table_name: str, table: Collection[str]) -> None:
    """Raise if a column to be added differs from one of the table by case only."""
    hint = other_case(name, table)
    if hint:
        raise ConfigError(f"Column {name!r} cannot be added to table {table_name!r}; nothing was written.{hint}")


def check_types_used(types: Collection[str], rows: Collection[str]) -> None:
    """Raise if `types` names a column that the rows do not have."""
    for name in types:
        if name not in rows:
            close = difflib.get_close_matches(name, rows, 1)
            advice = f"did you mean {close[0]!r}?" if close else f"they have {', '.join(rows)}."
            raise ConfigError(f"types= names column {name!r} that the rows do not have; nothing was written: {advice}")
