"""What `semel demo` shows: one Spark pipeline with two sinks, killed again and again, and what each made of it."""
