"""Trains one model with several all-reduces, and compares accuracy, loss and words sent."""
