"""Which entries travel: the hot loop of this library."""

from jaxsparse.select.exact import top_k

__all__ = ["top_k"]
