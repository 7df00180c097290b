"""The executor: requests that are enqueued on a server, and responses that are awaited, of any of them.

`book.py` decides without threads and without I/O; `executor.py` and `async_executor.py` bring it to a server.
"""
