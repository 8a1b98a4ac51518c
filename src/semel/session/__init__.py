"""Consume, transform, produce and commit as one, for plain Python."""
