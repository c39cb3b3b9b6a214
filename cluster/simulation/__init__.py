"""A virtual clock and latency models that drive `decoding` unchanged: what `paceline plan` asks."""
