"""The cluster of `up`, or a private one: our own Ray head, its record on disk, signals."""
