"""Values and seams that every room of the engine may import: settings, requests, errors, stats, protocols.

The lowest room: it imports no other room. No torch.
"""
