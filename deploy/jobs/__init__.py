"""Entry points for `ray job submit`, and for the pods of the chart."""
