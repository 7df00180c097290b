"""The service `inference.GRPCInferenceService` of KServe, with Triton's extensions: the wire of `tritonclient`.

A request of named tensors becomes a message of our own proto, and takes the same checks and the same path as every
other (`front/validation.py`, `front/calls.py`). The names are the same as in TensorRT-LLM's models for Triton. The
messages register themselves under Triton's own names, so a process has either this room or `tritonclient`.
"""
