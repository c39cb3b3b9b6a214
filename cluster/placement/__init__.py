"""Ray: where workers run, how they start, and how they are started again."""
