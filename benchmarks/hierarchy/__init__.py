"""Hosts with several devices each, in the network lab.

hosts    trains in the ways that are compared, and times the steps
"""
