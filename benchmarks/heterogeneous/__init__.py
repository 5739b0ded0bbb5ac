"""Partial reduce beside other ways to train workers of different speeds, in virtual time.

lab      gradients that are real, in virtual time
methods  partial reduce and seven others
virtual  trainings of the digits in virtual time, and rows of the tables
report   tables, ours beside the paper's, and the goal
figures  figures
"""
