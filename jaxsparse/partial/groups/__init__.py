"""Partial reduce: workers average their models in groups of those that are ready."""
