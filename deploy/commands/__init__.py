"""The commands of `paceline`, a module for each family."""
