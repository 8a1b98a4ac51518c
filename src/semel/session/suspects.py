"""Which record of a transaction was refused? Smaller and smaller transactions find it. Pure.

A broker refuses a batch, not a record. So the records of an aborted transaction are tried again in halves, down to one.
"""

from __future__ import annotations

import pyarrow as pa


class Suspects:
    """
    >>> suspects = Suspects()
    >>> table = pa.table({"topic": ["t"] * 4, "partition": [0] * 4, "offset": [5, 6, 7, 8]})
    >>> suspects.failed(table, ValueError("too large"))
    True
    >>> suspects.limit
    2
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        """How many records the next transaction may have, while a failing one is looked for."""
        self._found: dict[tuple[str, int, int], BaseException] = {}
        self._cleared = 0
        self._to_clear = 0

    def failed(self, table: pa.Table, error: BaseException) -> bool:
        """A transaction with these records could not be written. False if no record can be at fault.

        That is so if there is none, or if the only one was known to fail and its results were not written.
        """
        good, _ = self.split(table)
        count = table.num_rows
        if not good.num_rows:
            return False
        if count == 1:
            first = table.slice(0, 1).to_pylist()[0]
            self._found[(first["topic"], first["partition"], first["offset"])] = error
            return True
        self._to_clear = max(self._to_clear - self._cleared, count)
        self._cleared = 0
        self.limit = max(1, count // 2)
        return True

    def passed(self, count: int) -> None:
        """A transaction of so many records was committed."""
        self._cleared += count
        if self._cleared >= self._to_clear:
            self.limit, self._to_clear, self._cleared = None, 0, 0
        elif self.limit is not None:
            self.limit *= 2
        self._found = {} if self.limit is None else self._found

    def split(self, table: pa.Table) -> tuple[pa.Table, list[tuple[pa.Table, BaseException]]]:
        """The records that may be processed, and those that are known to fail."""
        if not self._found:
            return table, []
        keys = zip(table["topic"].to_pylist(), table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True)
        places = {index: self._found[key] for index, key in enumerate(keys) if key in self._found}
        bad = [(table.slice(index, 1), error) for index, error in places.items()]
        return table.filter(pa.array([index not in places for index in range(table.num_rows)])), bad
