"""A shard of the target: its gRPC service, what it knows of each sequence over one stream, and the
verdicts of a step.
"""
