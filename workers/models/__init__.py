"""Models by name: where their checkpoints are, and how they are fetched."""
