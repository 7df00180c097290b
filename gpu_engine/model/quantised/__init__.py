"""Weights of 4 and 8 bits on a CPU: reading a GGUF file's own blocks, quantising others, and one native forward over
them. No module here knows requests.
"""
