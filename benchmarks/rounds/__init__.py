"""Rounds of real processes in the lab: workers that are killed, stopped, cut off, slow or wrong."""
