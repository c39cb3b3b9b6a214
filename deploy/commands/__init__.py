"""The commands of `paceline`, one module for each family."""
