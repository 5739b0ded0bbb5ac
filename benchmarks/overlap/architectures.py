"""Gradient tensors of four well-known networks, from their definitions: shapes, and fractions of the backward time.

Tensors are those of the usual PyTorch code, in the order of the forward pass, so the last one is ready first. Seconds
are a roofline of one RTX 2080 Ti: 4 floating-point operations a multiply-add (the gradients of the input and of the
weights) at 13.4 TFLOP/s, and for what is bound by memory (normalization with its activation, softmax, embeddings) 6
passes of 4 bytes over the activations at 616 GB/s. Only their proportions are meant: scale them to a measured total.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

_Kernel = int | tuple[int, int]

_SECONDS_A_MAC = 4 / 13.4e12
_SECONDS_AN_ACTIVATION = 6 * 4 / 616e9


class Tensor(NamedTuple):
  """A gradient tensor.

  Attributes:
    name: a short one.
    entries: its size.
    seconds: that backward takes before this tensor is ready and after the following one was, for a batch.
  """

  name: str
  entries: int
  seconds: float


class _Net:
  """Tensors of a network that is being described, and the size of its activations, batch × height × width."""

  def __init__(self, batch: int, side: int, channels: int):
    self.batch, self.side, self.channels = batch, side, channels
    self.tensors: list[Tensor] = []

  def add(self, name: str, entries: int, seconds: float = 0.0) -> None:
    """A tensor more."""
    self.tensors.append(Tensor(name, entries, seconds))

  def conv(self, out: int, kernel: _Kernel, stride: int = 1, same: bool = True) -> None:
    """A convolution without bias; `same` keeps height and width but for the stride."""
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    padded = self.side if same else self.side - max(high, wide) + 1
    self.side = math.ceil(padded / stride)
    entries = self.channels * out * high * wide
    self.channels = out
    self.add("conv", entries, _SECONDS_A_MAC * entries * self.batch * self.side**2)

  def norm(self) -> None:
    """A batch normalization and the activation after it: both tensors are ready at once."""
    self.add("scale", self.channels)
    self.add("shift", self.channels, _SECONDS_AN_ACTIVATION * self.channels * self.batch * self.side**2)

  def linear(self, inputs: int, out: int, rows: int) -> None:
    """A dense layer on so many rows, with its bias."""
    self.add("weight", inputs * out)
    self.add("bias", out, _SECONDS_A_MAC * inputs * out * rows)

  def pool(self, stride: int = 2) -> None:
    """Fewer places."""
    self.side = math.ceil(self.side / stride)


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


_Branches = list[list[tuple[Any, ...]]]  # (channels, kernel) or (channels, kernel, stride): a stride has no padding
_INCEPTION_A: _Branches = [[(96, 1)], [(64, 1), (96, 3)], [(64, 1), (96, 3), (96, 3)], [(96, 1)]]
_INCEPTION_B: _Branches = [
  [(384, 1)],
  [(192, 1), (224, (1, 7)), (256, (7, 1))],
  [(192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))],
  [(128, 1)],
]
_REDUCTION_A: _Branches = [[(384, 3, 2)], [(192, 1), (224, 3), (256, 3, 2)]]
_REDUCTION_B: _Branches = [[(192, 1), (192, 3, 2)], [(256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2)]]


def inception_v4() -> list[Tensor]:
  """Szegedy et al. 2017, 32 images of 224²."""
  net = _Net(32, 224, 3)
  for out, stride, same in ((32, 2, False), (32, 1, False), (64, 1, True)):
    net.conv(out, 3, stride, same)
    net.norm()
  _branches(net, [[(96, 3, 2)]], kept=64)  # beside a max-pooling, as in all that shrinks
  _mixed_4a(net)
  _branches(net, [[(192, 3, 2)]], kept=192)
  for _ in range(4):
    _branches(net, _INCEPTION_A)
  _branches(net, _REDUCTION_A, kept=384)
  for _ in range(7):
    _branches(net, _INCEPTION_B)
  _branches(net, _REDUCTION_B, kept=1024)
  for _ in range(3):
    _inception_c(net)
  net.linear(net.channels, 1000, net.batch)
  return net.tensors


def _branches(net: _Net, branches: _Branches, kept: int = 0) -> None:
  """Branches side by side, whose channels are put together with `kept` of a pooling."""
  side, channels, outs = net.side, net.channels, [kept]
  for branch in branches:
    net.side, net.channels = side, channels
    for out, kernel, *stride in branch:
      net.conv(out, kernel, stride[0] if stride else 1, same=not stride)
      net.norm()
    outs.append(net.channels)
  net.channels = sum(outs)


def _mixed_4a(net: _Net) -> None:
  side, channels = net.side, net.channels
  branches: tuple[list[_Kernel], ...] = ([1], [1, (1, 7), (7, 1)])
  for kernels in branches:
    net.side, net.channels = side, channels
    for kernel in kernels:
      net.conv(64, kernel)
      net.norm()
    net.conv(96, 3, same=False)
    net.norm()
  net.channels = 2 * 96


def _inception_c(net: _Net) -> None:
  """Its branches fork at their ends."""
  channels, outs = net.channels, 0
  trunks: tuple[list[tuple[int, _Kernel]], ...] = ([], [(384, 1)], [(384, 1), (448, (3, 1)), (512, (1, 3))], [])
  for trunk in trunks:
    net.channels = channels
    for out, kernel in trunk:
      net.conv(out, kernel)
      net.norm()
    before = net.channels
    forks: list[_Kernel] = [(1, 3), (3, 1)] if trunk else [1]
    for fork in forks:
      net.channels = before
      net.conv(256, fork)
      net.norm()
      outs += 256
  net.channels = outs


def bert_base() -> list[Tensor]:
  """Devlin et al. 2019 with both heads of pre-training, 64 sequences of 64 tokens; the decoder's weight is tied."""
  batch, length, width, heads, words = 64, 64, 768, 12, 30522
  rows = batch * length
  net = _Net(rows, 1, width)
  net.add("words", words * width, _SECONDS_AN_ACTIVATION * rows * width)
  net.add("places", 512 * width)
  net.add("kinds", 2 * width)
  net.norm()
  for _ in range(12):
    attention = 2 * _SECONDS_A_MAC * rows * length * width + _SECONDS_AN_ACTIVATION * rows * length * heads
    for projection in ("query", "key", "value"):
      net.linear(width, width, rows)
      if projection == "value":  # what is done after the projections is done before their gradients
        last = net.tensors.pop()
        net.add(last.name, last.entries, last.seconds + attention)
    net.linear(width, width, rows)
    net.norm()
    net.linear(width, 4 * width, rows)
    net.linear(4 * width, width, rows)
    net.norm()
  net.linear(width, width, batch)  # the pooler
  net.linear(width, width, rows)
  net.norm()
  net.add("bias", words, _SECONDS_A_MAC * rows * width * words + _SECONDS_AN_ACTIVATION * rows * words)
  net.linear(width, 2, batch)
  return net.tensors


MODELS: dict[str, Callable[[], list[Tensor]]] = {
  "resnet152": resnet152,
  "densenet201": densenet201,
  "inception_v4": inception_v4,
  "bert_base": bert_base,
}
