"""Proof: a seeded simulation of the broker, with its clients, its network, its disk and its clock."""
