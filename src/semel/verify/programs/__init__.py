"""`semel verify --command`: a user's own program between its input and its output topics, under faults."""
