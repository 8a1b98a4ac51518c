"""Helpers for tests: a real Apache Kafka on this machine, and certificates for its TLS listener.

Nothing is imported here, so that `import semel.testing` needs no test dependency, no Java and no Maven.
"""
