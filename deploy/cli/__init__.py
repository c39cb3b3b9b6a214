"""The `paceline` command: a file for each subcommand, and what they print."""
