"""On the engine's thread: KV pages that leave for another engine, and pages that come from one.

Exports `PageTransfers`, which the loop drives, and `PageTransferClient`, the same for other threads.
"""
