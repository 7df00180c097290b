"""A deterministic simulation of the engine process and the grammar process, with faults, in one thread.

Invariant: no server imports it. See docs/testing.md.
"""
