"""The service `vllm.grpc.engine.VllmEngine` of vLLM's gRPC front end: the wire that gateways such as smg speak.

Its messages come from the PyPI package smg-grpc-proto (the extra `vllm-wire`); only modules of this room import it.
A request becomes a message of our own proto, and takes the same checks and the same path as every other
(`front/validation.py`, `front/calls.py`).
"""
