"""Converts between the messages of proto/paceline/v1 and the plain values of this package."""
