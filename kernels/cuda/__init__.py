"""CUDA kernels, compiled at run time. Nothing here is imported where there is no device."""
