"""What each backend enforces of JSON Schema, found out by asking the installed libraries.

Invariant: nothing here states what a backend does; a table is made of what it did with cases (`keywords`, `arrays`,
`combinations`, `formats`), and an invalid instance that is accepted without a word is a failure, never a table entry.
`python -m tools.enforced` prints the table; docs/enforced.md is its output, which a test holds to behaviour.
"""
