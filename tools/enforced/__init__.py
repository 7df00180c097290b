"""A developer's tool that measures what each installed backend enforces of JSON Schema.

`python -m tools.enforced` prints the table, and with `--write` it writes docs/enforced.md; a test compares that page
with the libraries. The cases are data (`keywords`, `combinations`, `formats`).
Invariant: every entry of the table is an observation. An invalid text that is accepted without a warning is a failure.
"""
