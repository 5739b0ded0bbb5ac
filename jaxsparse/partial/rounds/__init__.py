"""Rounds: local steps of workers that come and go, and exchanges whose result all or none of them apply."""
