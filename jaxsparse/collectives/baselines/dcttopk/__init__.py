"""DctTopk: an all-gather of the largest DCT coefficients of each tile of the gradient (the exchange of DeMo).

Gradients of neighbouring weights are alike, so that few coefficients of their cosine
transform hold most of them. The transform is orthonormal and linear: to send
coefficients, and to keep as a residual what they do not deliver, is the same in both
bases.

`algorithm` has the collective, `tiling` the tiles of the leaves and their transforms.
"""

from jaxsparse.collectives.baselines.dcttopk.algorithm import DctTopk

__all__ = ["DctTopk"]
