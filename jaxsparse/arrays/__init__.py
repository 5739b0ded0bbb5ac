"""Arrays and pytrees of arrays, without workers: nothing here sends a message.

flatten    gradient pytree <-> one f32[n]
sums       sums whose order is fixed, so that all platforms have the same bits
noise      random numbers without state, from a counter
low_rank   factors of matrices (PowerSGD)
"""
