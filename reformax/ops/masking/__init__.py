"""Masks: causality, segments, padding, bands."""
