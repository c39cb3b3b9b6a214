"""Tensor parallelism: which part of a model a rank holds, and how ranks add up their results."""
