"""A model cut into ranks, and how the ranks add up."""
