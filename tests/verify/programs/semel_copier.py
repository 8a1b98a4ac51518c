"""A correct program: Semel's own session, one transaction for each portion."""

from __future__ import annotations

import os

import semel


def main() -> None:
    semel.run(
        lambda row: row.value,
        by="row",
        to=os.environ["SEMEL_OUTPUT"],
        bootstrap=os.environ["SEMEL_BOOTSTRAP"],
        group="copier",
        topics=[os.environ["SEMEL_INPUT"]],
        name="copier",
        instance="0",
        auto_offset_reset="earliest",
        session_timeout_ms=6_000,
        transaction_timeout_ms=5_000,
    )


if __name__ == "__main__":
    main()
