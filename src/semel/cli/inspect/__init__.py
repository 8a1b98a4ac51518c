"""`semel inspect`: what is in a cluster, and who holds whom back."""

from __future__ import annotations

import typer

from semel.cli.inspect.groups import groups
from semel.cli.inspect.ledger import ledger
from semel.cli.inspect.producers import producers
from semel.cli.inspect.topic import topic
from semel.cli.inspect.transactions import transactions
from semel.cli.output import EXIT_CODES

inspect = typer.Typer(
    no_args_is_help=True,
    help="Look at transactions, producers, groups, topics and ledgers. Only `transactions --end` changes anything.",
)
inspect.command(epilog=EXIT_CODES)(transactions)
inspect.command(epilog=EXIT_CODES)(producers)
inspect.command(epilog=EXIT_CODES)(groups)
inspect.command(epilog=EXIT_CODES)(topic)
inspect.command(epilog=EXIT_CODES)(ledger)
