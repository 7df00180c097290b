"""Lockstep's device code: leaves that import no other package of ours.

This file imports nothing: transformers looks for Hugging Face's package of the same name. The first words here tell the
two packages apart (gpu_engine/ops/installation.py).
"""
