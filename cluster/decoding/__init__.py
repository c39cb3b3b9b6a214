"""Every decision of a driver, without I/O and without a clock: events in, instructions out."""
