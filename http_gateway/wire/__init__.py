"""The fields of the HTTP API as pydantic models, and its errors. No I/O, and no knowledge of the engine's messages."""
