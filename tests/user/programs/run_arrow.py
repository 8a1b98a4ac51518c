"""Split orders into large and small ones, a whole Arrow table at a time."""

import sys

import pyarrow as pa
import pyarrow.compute as pc

import semel


def split(table: pa.Table):
    text = pc.cast(table["value"], pa.string())
    found = pc.extract_regex(text, r'"amount": (?P<amount>\d+)')
    amounts = pc.cast(pc.struct_field(found, "amount"), pa.int64())
    large = pc.greater_equal(amounts, 25)
    return {"large-orders": table.filter(large), "small-orders": table.filter(pc.invert(large))}


semel.run(split, bootstrap=sys.argv[1], group="splitter", topics=["orders"], name="splitter", instance="only")
