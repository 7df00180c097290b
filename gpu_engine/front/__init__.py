"""The public gRPC port, on the event loop: listening, checks, prompts, streaming of answers, grammar handles.

The room ends at the protocols of `api.ports`, `EngineCore` and `GrammarAccess`. The outline of one request is
`calls.Calls.answer`.
"""
