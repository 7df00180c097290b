"""Attention over the paged KV cache on a GPU.

`paged.py` launches; `decode.py` has the kernels for a few query positions, `prompt.py` the kernels for a chunk of a
prompt, and `block.py` the arithmetic that both share."""
