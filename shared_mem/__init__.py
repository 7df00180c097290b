"""The segment that both processes share: its layout, the ends that post and answer, and the native ordering.

Not responsible for: RPC and event loops (see the services).
"""
