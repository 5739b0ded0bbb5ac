"""The transformer whose step is compiled (`benchmarks.compiled`) and timed (`benchmarks.device`)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Transformer(NamedTuple):
  """A decoder over tokens, by default GPT-2 small, whose number of symbols is rounded up to a multiple of 128."""

  width: int = 768
  blocks: int = 12
  heads: int = 12
  length: int = 1024  # tokens of a sequence
  symbols: int = 50_304

  @property
  def entries(self) -> int:
    """The number of parameters."""
    return sum(math.prod(shape) for shape in self._shapes.values())

  @property
  def _shapes(self) -> dict[str, tuple[int, ...]]:
    d = self.width
    of_block = {
      "up": (d, 4 * d),
      "down": (4 * d, d),
      "qkv": (d, 3 * d),
      "out": (d, d),
      "norm1": (d,),
      "norm2": (d,),
    }
    stacked = {name: (self.blocks, *shape) for name, shape in of_block.items()}
    return stacked | {
      "symbols": (self.symbols, d),
      "positions": (self.length, d),
      "norm": (d,),
    }

  def parameters(self, seed: int = 0) -> dict[str, jax.Array]:
    """The parameters before training, float32; those of all blocks are stacked."""
    keys = jax.random.split(jax.random.key(seed), len(self._shapes))
    draw = lambda key, name, shape: (
      jnp.ones(shape) if "norm" in name else 0.02 * jax.random.normal(key, shape)
    )
    return {
      name: draw(key, name, shape)
      for key, (name, shape) in zip(keys, self._shapes.items(), strict=True)
    }

  def loss(
    self,
    params: dict[str, jax.Array],
    tokens: jax.Array,
    gather: Callable[[Any], Any] = lambda tree: tree,
  ) -> jax.Array:
    """The mean cross-entropy of the next token; products in bfloat16, blocks computed again in backward.

    Args:
      params: as `parameters` makes them.
      tokens: i32[sequences, length + 1].
      gather: applied to the parameters of a block, in bfloat16, before they are used.
    """
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    split = lambda x: x.reshape(*x.shape[:-1], self.heads, -1)

    def normal(x: jax.Array, scale: jax.Array) -> jax.Array:
      square = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)
      return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale

    @jax.checkpoint
    def block(x: jax.Array, own: dict[str, jax.Array]) -> tuple[jax.Array, None]:
      own = gather(own)
      q, k, v = map(split, jnp.split(normal(x, own["norm1"]) @ own["qkv"], 3, -1))
      x = (
        x
        + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        @ own["out"]
      )
      return x + jax.nn.gelu(normal(x, own["norm2"]) @ own["up"]) @ own["down"], None

    symbols = gather(half["symbols"])
    blocks = {
      name: x
      for name, x in half.items()
      if name not in ("symbols", "positions", "norm")
    }
    x, _ = jax.lax.scan(
      block, symbols[tokens[:, :-1]] + gather(half["positions"])[None], blocks
    )
    logits = (normal(x, gather(half["norm"])) @ symbols.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
