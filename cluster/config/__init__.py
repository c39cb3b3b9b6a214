"""The configuration: one TOML file, closed and frozen, overridden by the environment."""
