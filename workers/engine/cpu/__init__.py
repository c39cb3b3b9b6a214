"""The engine on a CPU."""
