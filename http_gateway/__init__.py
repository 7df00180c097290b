"""OpenAI's HTTP API in front of one or several engines, as a separate process.

Invariant: JSON and SSE never take an engine's GIL, and the gateway keeps no state that a new one would lack.

Rooms, from the top: `http` (ASGI, connections, keys), `answers` (from HTTP to the engine's messages and back),
`engines` (which engine gets a request), `wire` (the fields of the HTTP API).
"""
