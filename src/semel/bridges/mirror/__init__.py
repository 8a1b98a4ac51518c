"""From cluster to cluster, exactly once, with the source's transactions kept whole."""
