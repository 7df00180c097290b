"""What clients get of the steps: events and counters, and the tensors that some requests return.

Exports: `OutputProcessor`, to which the loop gives each collected step, and `OutputStreams`, which it runs once an
iteration while a request asks for tensors.
"""
