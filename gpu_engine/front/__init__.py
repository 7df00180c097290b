"""The public gRPC port, on the event loop: listening, checks, prompts, streaming of answers, grammar handles.

The room ends at the protocols of `api.ports`: `EngineCore` below it, `GrammarAccess` beside it. The outline of one
request is `calls.Calls._generate`.
"""
