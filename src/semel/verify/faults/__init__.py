"""Faults for a run of `semel verify`: planned from a seed, carried out on real processes, and recorded."""
