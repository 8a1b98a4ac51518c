"""An exactly-once message processor: every message of one topic, with "-ok" behind it, once in another topic.

    python examples/exactly_once_processor.py 127.0.0.1:9092 input output 0

The last word names the instance. Start several to share the work, end them however you like: nothing is lost and
nothing appears twice. One that is started again under its name goes on at once with what it had.
"""

import sys

import semel

bootstrap, source, target, instance = sys.argv[1:]
settings = {"bootstrap.servers": bootstrap, "group.instance.id": instance}
with semel.Session(settings, group="processor", topics=[source], name="processor", instance=instance) as session:
    for transaction in session:
        for row in transaction.rows():
            transaction.send(target, (row.value or b"") + b"-ok", key=row.key, headers=row.headers)
