"""KV pages between engines: a prefill engine serves them, a decode engine fetches them.

Exports `Transfer` (see setup.py), which the server opens for an engine whose role is "prefill" or "decode".
"""
