"""A developer's tool that measures what each installed backend enforces of JSON Schema.

`python -m tools.enforced` prints the tables, and with `--write` it writes them into docs/grammars.md; a test compares
that section with the libraries. The cases are data (`keywords`, `combinations`, `formats`).
Invariant: every entry of the table is an observation. An invalid text that is accepted without a warning is a failure.
"""
