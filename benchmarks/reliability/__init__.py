"""Campaigns against training: interruptions, power cuts, failing calls, bad inputs.

`python -m benchmarks.reliability` lists them.
"""
