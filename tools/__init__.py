"""Programs for developers of Lockstep; no server imports them, and they are not part of the installed package.

`configuration` writes docs/configuration.md, `capabilities` a table of docs/features.md, `enforced` a section of
docs/grammars.md, `site` the pages of the documentation's site; `train_adapter` trains the adapters of the examples,
`scale` plans fleets. Each is run as `python -m tools.NAME` from the checkout, and `--help` says what it needs.
"""
