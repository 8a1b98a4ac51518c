#!/bin/sh
# Load today's orders in one transaction, read them with our own consumer, and alert if the group is behind.
# Usage: SEMEL_BOOTSTRAP=HOST:PORT check_lag.sh ORDERS_FILE CONSUMER...
set -eu
orders=$1
shift

semel topics create orders --partitions 1
semel produce orders --key-separator : --header source=shop --transaction <"$orders"
"$@"

lag=$(semel inspect groups billing --json | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["lag"]["at_most"])')
semel inspect groups billing
if [ "$lag" -gt 0 ]; then
    echo "billing is $lag records behind"
    exit 3
fi
echo "billing is up to date"
semel tail orders --from earliest --json | head -n 1
