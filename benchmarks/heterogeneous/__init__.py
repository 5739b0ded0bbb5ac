"""Partial reduce beside other ways to train workers of different speeds, in virtual time.

virtual  trainings of the digits in virtual time, and rows of the tables
report   tables, ours beside the paper's, and the goal
figures  figures
"""
