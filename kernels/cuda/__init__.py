"""GPU kernels, in Triton and CUDA C, compiled at run time. These modules are imported only where a device is used.

The modules here are the kernels of a step, with what they share: posting and flags, inputs, sampling, drafting, and the
operators of a decoder layer. Attention is in `attention/`.
"""
