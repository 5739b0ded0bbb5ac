"""Seconds of selecting k of n entries on one device, and of a whole update of one worker."""
