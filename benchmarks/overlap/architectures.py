"""Gradient tensors of four well-known networks, from their definitions: shapes, and fractions of the backward time.

Tensors are those of the usual PyTorch code, in the order of the forward pass, so the
last one is ready first. Seconds are a roofline of one RTX 2080 Ti: 4 floating-point
operations a multiply-add (the gradients of the input and of the weights) at 13.4
TFLOP/s, and for what is bound by memory (normalization with its activation, softmax,
embeddings) 6 passes of 4 bytes over the activations at 616 GB/s. Only their proportions
are meant: scale them to a measured total.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

_SECONDS_A_MAC = 4 / 13.4e12
_SECONDS_AN_ACTIVATION = 6 * 4 / 616e9


class Tensor(NamedTuple):
  """Entries of a gradient tensor, and seconds of backward from the following tensor to this one, for a batch."""

  entries: int
  seconds: float = 0.0


class _Net:
  """Tensors of a network that is being described, and the size of its activations, batch × height × width."""

  def __init__(self, batch: int, side: int, channels: int):
    self.batch, self.side, self.channels = batch, side, channels
    self.tensors: list[Tensor] = []

  def conv(
    self, out: int, kernel: int | tuple[int, int], stride: int = 1, same: bool = True
  ) -> None:
    """A convolution without bias; `same` keeps height and width but for the stride."""
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    self.side = math.ceil(
      (self.side if same else self.side - max(high, wide) + 1) / stride
    )
    entries, self.channels = self.channels * out * high * wide, out
    self.tensors.append(
      Tensor(entries, _SECONDS_A_MAC * entries * self.batch * self.side**2)
    )

  def norm(self) -> None:
    """A batch normalization and the activation after it: scale and shift are ready at once."""
    seconds = _SECONDS_AN_ACTIVATION * self.channels * self.batch * self.side**2
    self.tensors += [Tensor(self.channels), Tensor(self.channels, seconds)]

  def linear(self, inputs: int, out: int, rows: int, more: float = 0.0) -> None:
    """A dense layer on so many rows, with its bias; `more` seconds are spent before its gradients."""
    self.tensors += [
      Tensor(inputs * out),
      Tensor(out, _SECONDS_A_MAC * inputs * out * rows + more),
    ]

  def pool(self) -> None:
    """Half of height and width."""
    self.side = math.ceil(self.side / 2)

  def branches(self, branches: Sequence[Sequence[Any]], kept: int = 0) -> None:
    """Branches side by side, whose channels are put together with `kept` of a pooling.

    A branch has convolutions (channels, kernel), or (channels, kernel, stride) without
    padding, then maybe branches.
    """
    side, channels, total = self.side, self.channels, kept
    for branch in branches:
      self.side, self.channels = side, channels
      for layer in branch:
        if isinstance(layer, list):
          self.branches(layer)
          continue
        out, kernel, *stride = layer
        self.conv(out, kernel, stride[0] if stride else 1, same=not stride)
        self.norm()
      total += self.channels
    self.channels = total


def resnet152() -> list[Tensor]:
  """He et al. 2016, 32 images of 224²."""
  net = _Net(32, 224, 3)
  net.conv(64, 7, stride=2)
  net.norm()
  net.pool()
  for stage, (width, blocks) in enumerate([(64, 3), (128, 8), (256, 36), (512, 3)]):
    for block in range(blocks):
      stride, side, channels = 2 if stage and not block else 1, net.side, net.channels
      for out, kernel, step in ((width, 1, 1), (width, 3, stride), (4 * width, 1, 1)):
        net.conv(out, kernel, step)
        net.norm()
      if not block:  # the shortcut
        net.side, net.channels = side, channels
        net.conv(4 * width, 1, stride)
        net.norm()
  net.linear(net.channels, 1000, net.batch)
  return net.tensors


def densenet201() -> list[Tensor]:
  """Huang et al. 2017, 32 images of 224²."""
  net, growth = _Net(32, 224, 3), 32
  net.conv(64, 7, stride=2)
  net.norm()
  net.pool()
  for stage, layers in enumerate([6, 12, 48, 32]):
    if stage:  # a transition: half the channels, half the side
      net.norm()
      net.conv(net.channels // 2, 1)
      net.pool()
    for _ in range(layers):
      channels = net.channels
      net.norm()
      net.conv(4 * growth, 1)
      net.norm()
      net.conv(growth, 3)
      net.channels = channels + growth
  net.norm()
  net.linear(net.channels, 1000, net.batch)
  return net.tensors


_FORK = [[(256, (1, 3))], [(256, (3, 1))]]
_INCEPTION_V4: list[
  tuple[int, list[list[Any]], int]
] = [  # repetitions, branches, channels of a pooling beside them
  (1, [[(32, 3, 2), (32, 3, 1), (64, 3)]], 0),
  (1, [[(96, 3, 2)]], 64),
  (1, [[(64, 1), (96, 3, 1)], [(64, 1), (64, (1, 7)), (64, (7, 1)), (96, 3, 1)]], 0),
  (1, [[(192, 3, 2)]], 192),
  (4, [[(96, 1)], [(64, 1), (96, 3)], [(64, 1), (96, 3), (96, 3)], [(96, 1)]], 0),
  (1, [[(384, 3, 2)], [(192, 1), (224, 3), (256, 3, 2)]], 384),
  (
    7,
    [
      [(384, 1)],
      [(192, 1), (224, (1, 7)), (256, (7, 1))],
      [(192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))],
      [(128, 1)],
    ],
    0,
  ),
  (
    1,
    [[(192, 1), (192, 3, 2)], [(256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2)]],
    1024,
  ),
  (
    3,
    [
      [(256, 1)],
      [(384, 1), _FORK],
      [(384, 1), (448, (3, 1)), (512, (1, 3)), _FORK],
      [(256, 1)],
    ],
    0,
  ),
]


def inception_v4() -> list[Tensor]:
  """Szegedy et al. 2017, 32 images of 224²."""
  net = _Net(32, 224, 3)
  for times, branches, kept in _INCEPTION_V4:
    for _ in range(times):
      net.branches(branches, kept)
  net.linear(net.channels, 1000, net.batch)
  return net.tensors


def bert_base() -> list[Tensor]:
  """Devlin et al. 2019 with both heads of pre-training, 64 sequences of 64 tokens; the decoder's weight is tied."""
  batch, length, width, heads, words = 64, 64, 768, 12, 30522
  rows = batch * length
  net = _Net(rows, 1, width)
  net.tensors += [
    Tensor(words * width, _SECONDS_AN_ACTIVATION * rows * width),
    Tensor(512 * width),
    Tensor(2 * width),
  ]
  net.norm()
  attention = (
    2 * _SECONDS_A_MAC * rows * length * width
    + _SECONDS_AN_ACTIVATION * rows * length * heads
  )
  for _ in range(12):
    # query, key and value: what is done after them is done before their gradients
    net.linear(width, width, rows)
    net.linear(width, width, rows)
    net.linear(width, width, rows, more=attention)
    net.linear(width, width, rows)
    net.norm()
    net.linear(width, 4 * width, rows)
    net.linear(4 * width, width, rows)
    net.norm()
  net.linear(width, width, batch)  # the pooler
  net.linear(width, width, rows)
  net.norm()
  net.tensors.append(
    Tensor(
      words,
      _SECONDS_A_MAC * rows * width * words + _SECONDS_AN_ACTIVATION * rows * words,
    )
  )
  net.linear(width, 2, batch)
  return net.tensors


MODELS = {
  make.__name__: make for make in (resnet152, densenet201, inception_v4, bert_base)
}
