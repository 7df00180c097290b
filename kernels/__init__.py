"""Device code: leaves that import nothing of ours. This file imports nothing: transformers looks for a hub `kernels`."""
