"""Fills mask rows: records come from the step plane, matchers move, rows and answers go back.

- `worker`: one engine's worker; reads records, publishes late answers;
- `work_queues`: the threads, one of which leads, and a queue of tasks for each slot;
- `tasks`: a record as a task, by itself or in a batch;
- `answers`: answers one record; `batch`: answers records of many slots in one native call;
- `matchers`: the matcher of each slot, and how a record moves it;
- `channel`: what the room needs of the step plane; `counters`: what a worker counts.

Depends on `completion` and `backends`, never on sockets, RPCs or compilation.
"""
