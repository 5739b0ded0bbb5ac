"""PowerSGD and ACP-SGD in numpy, in float64: a matrix is sent as the factors of one step of power iteration."""

import numpy as np


def basis_of(factor):
  """An orthonormal basis of the columns, by the singular value decomposition."""
  return np.linalg.svd(factor, full_matrices=False)[0]


class PowerSGD:
  """One matrix of all workers, f64[P, a, b]; `reduce` is one step. The right factor is the start of the next step."""

  def __init__(self, right, alternate):
    self.right, self.left, self.alternate, self.step, self.residual = (
      right,
      None,
      alternate,
      0,
      0.0,
    )

  def reduce(self, gradients):
    """The total [a, b]; the residuals [P, a, b] are an attribute."""
    m = gradients + self.residual
    # ACP-SGD: the left factor, from the right one
    if self.alternate and self.step % 2 == 0:
      basis = basis_of(self.right)
      self.left = (m @ basis).sum(0)  # an all-reduce
      total, own = self.left @ basis.T, m @ basis @ basis.T
    else:
      if not self.alternate:
        self.left = (m @ self.right).sum(0)  # an all-reduce
      basis = basis_of(self.left)
      self.right = (m.swapaxes(1, 2) @ basis).sum(0)  # an all-reduce
      total, own = basis @ self.right.T, basis @ basis.T @ m
    self.residual, self.step = m - own, self.step + 1
    return total
