"""Devices that are played: latency profiles and recorded text in place of models, and a relay that
adds network delay.
"""
