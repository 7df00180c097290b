"""OpenAI's HTTP API for one or several engines, in a separate process.

Invariant: JSON and SSE never take an engine's GIL. The gateway can be replaced at any time, because it keeps no state
that a new one would lack.

Rooms, from the top: `http` (ASGI, connections, keys), `answers` (from HTTP to the engine's messages and back),
`engines` (which engine gets a request), `wire` (the fields of the HTTP API).
"""
