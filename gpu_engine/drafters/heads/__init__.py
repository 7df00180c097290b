"""Heads that draft for one target: small networks that read its hidden states, in the formats of public checkpoints.

`eagle3*` drafts token by token, `dflash*` a whole block in one forward. Of each, `_files` reads a folder, `_head` is
the module, and the third is the module as a draft net. `formats.py` says which format a folder has.
"""
