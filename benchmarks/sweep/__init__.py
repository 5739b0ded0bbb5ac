"""The sweep: recipes on many small tasks, all with the same multiples of a rate."""
