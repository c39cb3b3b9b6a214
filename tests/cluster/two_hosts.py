"""A second host, as far as the network goes (deploy/bench/two_hosts.py), for tests."""

from __future__ import annotations

from deploy.bench.two_hosts import HERE, CannotMakeHostsError, SecondHost

__all__ = ["HERE", "CannotMakeHostsError", "SecondHost"]
