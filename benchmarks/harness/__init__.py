"""What the benchmarks share: the server as a process, a client that measures, workloads, summaries, tables and plots.

Not responsible for: any measurement of its own.
"""
