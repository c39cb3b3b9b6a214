"""What every worker process has: a gRPC server, a log, cores, a clock, threads beside the event
loop.
"""
