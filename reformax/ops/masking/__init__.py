"""Which keys a query sees: causality, segments, padding, bands."""
