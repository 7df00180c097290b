"""Coverage-guided fuzzing of all that reads text or bytes of others: requests, grammars, messages, shared memory.

Invariant: no server imports it, and only child.py needs atheris. See docs/testing.md.
"""
