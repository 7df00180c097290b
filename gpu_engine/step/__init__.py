"""The step: one program that verifies drafts, samples and drafts again, over buffers, a stream and a sync.

`program.py` is the step itself. A CPU runs it on an `ImmediateStream`, a GPU captures it on a CUDA stream (`device/`),
and the tests record it. `launches.py` names the few parts whose arithmetic is written once for each device.
"""
