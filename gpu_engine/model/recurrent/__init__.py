"""Layers with a state that goes from token to token: their memory, and what replaces transformers' modules."""
