"""Kafka's client side on blocking sockets: producer, fetcher, admin."""
