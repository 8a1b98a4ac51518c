"""One file per API, named by its key: checks, then one call into the state."""
