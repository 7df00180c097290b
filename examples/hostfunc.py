"""A Python function inside a CUDA graph: captured twice, replayed ten times, so every element becomes twenty.

    python examples/hostfunc.py

Needs a CUDA device. The function runs on the CPU, over CPU memory, in the order of the stream.
"""

from __future__ import annotations

import torch

from kernels.hostfunc import check, hostfunc


@hostfunc
def add_one(x: torch.Tensor) -> None:
    """Add one to every element."""
    x.add_(1)


def main() -> torch.Tensor:
    """Capture, replay, and return the vector."""
    x = torch.zeros(10, dtype=torch.int32)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        add_one(x)
        add_one(x)
    torch.cuda.synchronize()
    assert not x.any(), "capturing runs nothing"
    with torch.cuda.stream(stream):
        for _ in range(10):
            graph.replay()
    torch.cuda.synchronize()
    check()
    return x


if __name__ == "__main__":
    print(main())
