"""The driver: an asyncio loop that joins `decoding` to the gRPC streams of targets and drafters,
and serves callers.
"""
