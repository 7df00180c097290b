"""Programs for developers of Lockstep; no server imports them, and they are not part of the installed package.

`configuration` writes docs/configuration.md, `enforced` writes docs/enforced.md, `training` trains an EAGLE3 head,
`scale` plans fleets. Each is run as `python -m tools.NAME` from the checkout, and `--help` says what it needs.
"""
