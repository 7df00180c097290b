"""Benchmarks that print tables, and acceptance scripts that exit non-zero where a promise is broken.

Rooms: `harness` (what all of them share), `speed`, `quality`, `faults`, `gpu`, `peers`. `python -m benchmarks --help`
lists every harness.
"""
