"""A small vision transformer on letters, rendered with the fonts that matplotlib brings."""

import functools
import pathlib
import string

import jax
import matplotlib as mpl
import numpy as np
from flax import nnx
from PIL import Image, ImageDraw, ImageFont

from benchmarks.tasks.base import Arrays, Task, drawn
from benchmarks.tasks.lm import Block

_FONTS = (
  "DejaVuSans",
  "DejaVuSans-BoldOblique",
  "DejaVuSansMono",
  "DejaVuSansMono-Bold",
  "DejaVuSerif",
  "DejaVuSerif-Italic",
  "STIXGeneral",
  "STIXGeneralBol",
)
GROUPS = 4  # of fonts, where each worker has its own
_LETTERS = string.ascii_uppercase
_SIDE = 16  # pixels
_PATCH = 4
_WIDTH = 44
_HELD_OUT = 1024


class VisionTransformer(nnx.Module):
  """Two blocks over 16 patches of 4 × 4 pixels: 49,306 parameters."""

  def __init__(self, rngs: nnx.Rngs):
    self.patch = nnx.Linear(_PATCH**2, _WIDTH, rngs=rngs)
    self.position = nnx.Embed((_SIDE // _PATCH) ** 2, _WIDTH, rngs=rngs)
    block = lambda: Block(_WIDTH, 4, rngs, bias=False, causal=False)
    self.blocks = nnx.List([block() for _ in range(2)])
    self.norm = nnx.RMSNorm(_WIDTH, rngs=rngs)
    self.head = nnx.Linear(_WIDTH, len(_LETTERS), rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """f32[batch, 16, 16] to logits f32[batch, 26]."""
    cut = images.reshape(len(images), _SIDE // _PATCH, _PATCH, _SIDE // _PATCH, _PATCH)
    patches = cut.swapaxes(2, 3).reshape(len(images), -1, _PATCH**2)
    x = self.patch(patches) + self.position.embedding[...]
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x).mean(1))


def make(apart: bool = False) -> Task:
  """Classify letters, moved and with noise; `apart`: each of four workers has two of the eight fonts."""
  glyphs = render()

  def draw(random: np.random.Generator, size: int, fonts: np.ndarray) -> Arrays:
    letter = random.integers(0, len(_LETTERS), size)
    turned = random.integers(0, glyphs.shape[2], size)
    clean = glyphs[random.choice(fonts, size), letter, turned]
    # where the window of 16 pixels begins in the picture of 20
    starts = random.integers(0, glyphs.shape[-1] - _SIDE + 1, (2, size, 1))
    rows, columns = starts + np.arange(_SIDE)
    cut = clean[np.arange(size)[:, None, None], rows[:, :, None], columns[:, None]]
    noise = random.normal(size=cut.shape)
    return (cut + 0.7 * noise).astype(np.float32), letter.astype(np.int32)

  every = np.arange(len(_FONTS))
  own = lambda random, size, worker: draw(
    random, size, every[worker % GROUPS :: GROUPS]
  )
  mixed = lambda random, size: draw(random, size, every)
  return Task(
    "letters" + "_apart" * apart,
    f"letters in {len(_FONTS)} fonts" + ", two of them each worker's" * apart,
    lambda seed: VisionTransformer(nnx.Rngs(seed)),
    drawn(own, own=True) if apart else drawn(mixed),
    mixed(np.random.default_rng(0), _HELD_OUT),
  )


@functools.cache
def render() -> np.ndarray:
  """The letters f32[fonts, 26, turned, 20, 20] of mean 0 and deviation 1."""
  folder = pathlib.Path(mpl.get_data_path(), "fonts", "ttf")
  fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), 15) for name in _FONTS]
  pictures = np.array(
    [
      [[_picture(font, letter, turn) for turn in (-15, 0, 15)] for letter in _LETTERS]
      for font in fonts
    ],
    np.float32,
  )
  return (pictures - pictures.mean()) / pictures.std()


def _picture(font: ImageFont.FreeTypeFont, letter: str, degrees: int) -> np.ndarray:
  """u8[20, 20] of a letter that is turned."""
  side = _SIDE + 4
  picture = Image.new("L", (side, side))
  drawing = ImageDraw.Draw(picture)
  drawing.text((side / 2, side / 2), letter, 255, font, "mm")
  return np.asarray(picture.rotate(degrees, Image.Resampling.BILINEAR))
