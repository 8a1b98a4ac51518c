"""What the command line and a web page both show: transactions, producers, batches, groups with true lag, ledgers.

Values in, values out, or reads through `semel.Admin` and the client. Nothing here prints.
"""
