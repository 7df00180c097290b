"""Logits processors that ship with the engine, and the loading of any. Imports only `api`; torch is loaded by it.

`gpu_engine.processors.ngrams:NoRepeatedNgrams` is captured with the step,
`gpu_engine.processors.client_tokens:ForbiddenForClient` is called for one sequence, and
`gpu_engine.processors.long_answers:LengthPenalty` for all sequences of a step.
"""
