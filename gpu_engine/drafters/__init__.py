"""Drafters propose the K tokens that the next step verifies. A bad draft costs time, never correctness.

Each drafter implements `gpu_engine.step.program.Drafter` once, for every device. `build.py` makes the one that the
configuration names; docs/contributing.md says how to add one.
"""
