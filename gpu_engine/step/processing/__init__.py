"""Logits processors in a step: `host.py` calls them between two launches, `captured.py` enqueues them in a graph, and
`processing.py` holds both for one program."""
