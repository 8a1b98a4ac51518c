"""Both or neither: a database transaction and a Kafka transaction that commit together."""
