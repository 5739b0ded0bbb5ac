"""Partial reduce beside other ways to train workers of different speeds, in virtual time."""
