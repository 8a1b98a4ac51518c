"""Between Kafka and databases: the inbox, exactly-once sinks, and side effects."""
