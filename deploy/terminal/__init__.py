"""Lines, tables, progress bars and usage errors for people."""
