"""Signs and few-bit levels of dense arrays, with a scale for each block of entries.

blocks    layout of signs and levels in words; rounding and sums of them in few passes over memory
scales    the scale of a block
gathers   all-gather and reduce-scatter of shards rounded so (FSDP)
"""
