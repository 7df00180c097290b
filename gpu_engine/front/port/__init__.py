"""The public port: bound addresses, TLS, bearer tokens, and messages that do not parse.

Nothing here knows a service or a request; the rest of `front` builds on it.
"""
