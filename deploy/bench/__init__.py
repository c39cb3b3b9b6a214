"""One harness for measurements, and a file for each suite of `paceline bench`."""
