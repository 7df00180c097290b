"""Grammar text to compiled grammar: cache, queue, and the processes that compile and can be killed.

- `compiler`: the room's entry; cache, choice of the backend, one compilation for equal requests;
- `queue`, `pool`, `process`: which compilation is next, the processes, one process;
- `worker`, `proof`: the code of that process;
- `artifact`, `loader`, `disk_cache`: a compiled grammar as bytes, from there into this process, on disk.
"""
