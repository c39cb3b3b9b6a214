"""What every worker process has: a gRPC server, a log, cores and threads, a clock."""
