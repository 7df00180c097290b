"""Everything that needs a GPU: sections with a deadline each, run by `bench_gpu`, and larger runs of single sections.

Most sections also run on a CPU with smaller shapes, so that their code is tested without a GPU.
"""
