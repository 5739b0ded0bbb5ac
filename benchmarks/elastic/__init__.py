"""Training that loses a worker and gains two, beside an undisturbed one.

phases   the training between two changes of the number of workers
"""
