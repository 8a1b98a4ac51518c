"""A driver that tests kill: `python database_driver.py <JSON>` runs a query into a database to its end.

Its Spark is that of `small_stream.py`, so that it starts within a second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from database_modes import bad_parts_of, parts_of, target_for
from small_stream import Frame, Stream, use

from semel.bridges.spark_sink import DatabaseSink


def main() -> None:
    told = json.loads(sys.argv[1])
    stream = Stream(Path(told["folder"]))
    use(stream)
    dead_letter = told.get("dead_letter")
    sink = DatabaseSink(name=told["name"], to=target_for(told["place"], told["mode"], dead_letter=dead_letter))
    make = parts_of if dead_letter is None else bad_parts_of
    stream.run(sink, (Frame(make(batch, told["rows"])) for batch in range(told["batches"])))


if __name__ == "__main__":
    main()
