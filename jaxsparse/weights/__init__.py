"""Versions of parameters for readers: a chain of exact differences in the serving dtype, and anchors now and then.

A trainer publishes after any of its steps, and readers, such as inference workers, get
the bits that changed: of a model in bfloat16, few weights change in a step of a small
rate.

                    anchor 1   link 2   link 3   …   link 9, anchor 9   link 10   …
    first reading      x         x        x            x
    later                                                                  x

    folder        the leaves in the serving dtype, as bit patterns
    digests       each version is known by a digest, which is chained to the version before
    files         files that are there whole or not at all
    publisher     writes links and anchors, and removes old ones
    subscriber    reads them, refuses what is not proven, and keeps what it has

A link is the difference of bit patterns as integers: no arithmetic of floats, so
versions are the published ones bit for bit, with signs of zeros and kinds of NaN.
"""

from jaxsparse.weights.publisher import Publisher
from jaxsparse.weights.subscriber import Published, Subscriber

__all__ = ["Published", "Publisher", "Subscriber"]
