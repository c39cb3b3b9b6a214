"""Benchmark suites: ratios measured in one run, with the peer beside us."""
