"""Weights of 4 to 8 bits: on a CPU blocks, a GGUF file's own or rounded ones, and one native forward over them; on a
GPU rows of 8 bits for torch's scaled products. No module here knows requests.
"""
