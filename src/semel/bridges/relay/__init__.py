"""From a table in Postgres or SQLite into Kafka topics, each row once: `semel.relay` and `semel relay`."""
