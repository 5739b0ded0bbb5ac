"""Collectives of papers that another one dominates in every table.

They are there to compare with, and are found by name: `js.make_transform("gtopk", axis,
density=0.01)`.
"""
