"""From HTTP fields to the engine's messages, and from its responses to HTTP answers and events.

Invariant: everything but texts.py is pure.
"""
