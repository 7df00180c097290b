"""Forwards of their own, between steps, for tensors that requests ask for.

Exports: `TensorOutputs` computes rows of them over pages that no sequence has.
"""
