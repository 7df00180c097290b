"""Time and throughput: whole servers, two builds, the prefix cache, a forward, the shared memory, the sidecar.

Not responsible for: figures that need a GPU (see gpu).
"""
