"""Seconds of selecting k of n entries on one device, and of a whole update of one worker.

alone   one SparDL update of one worker alone
passes  passes over long arrays, read off a compiled program
"""
