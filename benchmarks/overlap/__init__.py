"""Seconds an iteration with communication hidden behind backward, on paper or in the network lab."""
