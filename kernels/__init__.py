"""Device code: leaves that import nothing of ours. It imports nothing: transformers looks for a hub `kernels`."""
