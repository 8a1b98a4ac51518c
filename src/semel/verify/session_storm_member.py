"""One member of the rebalance storm: a session that copies a topic until SIGTERM asks it to leave."""

from __future__ import annotations

import argparse
import signal
import sys

from semel.session.session import Session


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--bootstrap", "--group", "--source", "--target", "--protocol"):
        parser.add_argument(name, required=True)
    for name in ("--session-timeout-ms", "--records-max"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    settings: dict[str, object] = {"bootstrap": options.bootstrap, "session.timeout.ms": options.session_timeout_ms}
    if options.protocol == "consumer":
        settings["group.protocol"] = "consumer"
    else:
        settings["partition.assignment.strategy"] = options.protocol
    session = Session(
        settings,
        group=options.group,
        topics=[options.source],
        name=options.group,
        transaction_records_max=options.records_max,
    )
    signal.signal(signal.SIGTERM, lambda *_: session.stop())
    with session:
        for transaction in session:
            transaction.send_table(options.target, transaction.table)
    sys.stdout.write(f"{session.committed_count} committed, {session.aborted_count} aborted\n")


if __name__ == "__main__":
    main()
