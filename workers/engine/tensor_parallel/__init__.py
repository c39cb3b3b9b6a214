"""Tensor parallelism: which part of a model a rank holds, and how ranks combine their results."""
