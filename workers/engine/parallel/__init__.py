"""A model divided among ranks, and how the ranks add up."""
