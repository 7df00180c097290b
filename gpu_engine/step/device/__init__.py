"""The step on a CUDA device: the stream, graphs, pinned memory, the two syncs and the Triton launches.

`triton_launches.py` imports Triton, which a CPU installation lacks; import it only where a device executor is built.
"""
