"""Change capture: committed changes of Postgres tables into Kafka, each once, by logical decoding."""
