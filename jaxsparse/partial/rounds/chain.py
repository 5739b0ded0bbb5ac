"""The last rounds of an anchor as links: the packed totals that its members have applied.

    anchor of round r  ── links of the rounds r + 1 … s ──>  anchor of round s, bit for bit

A worker that was away applies them to its own anchor by the members' own program. The
bytes of links, as a donor sends them in place of its anchor:

    0 u32 | words of the header u32 | header, JSON: round r, its id, of each link the
    number and the size of the group, its members, words | words of each link
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxsparse.arrays.flatten import flatten
from jaxsparse.partial.net import strict_json
from jaxsparse.partial.net.messages import MOST_MEMBERS, WorkerGroup
from jaxsparse.partial.rounds.lineage import Lineage
from jaxsparse.partial.rounds.links import subtract
from jaxsparse.partial.rounds.outer_step import Anchor, OuterStep, Result
from jaxsparse.sparse import packing

_START = 2  # words before the header: 0, and the header's length in words


@dataclasses.dataclass
class RoundLink:
  """What turns an anchor into that of the next round.

  Attributes:
    number: of the group.
    size: number of workers of the group.
    members: their numbers; () if the outer step was skipped.
    totals: of the outer step, then f32[n] of each link member; () once they are packed.
    words: u32[m], packed totals; None until then, and where an anchor is as small.
    nbytes: of the packed totals, also where `words` is None; 0 until then.
  """

  number: int
  size: int
  members: tuple[int, ...]
  totals: Sequence[np.ndarray] = ()
  words: np.ndarray | None = None
  nbytes: int = 0

  @classmethod
  def of(cls, group: WorkerGroup, result: Result) -> "RoundLink":
    """The link of a round that counts, not packed yet."""
    members = () if result.skipped else group.members
    return cls(group.number, result.anchor.size, members, result.totals)

  def pack(self, most: int) -> None:
    """Replaces `totals` by `words`, packed; `words` stays None with `most` bytes or more, the size of an anchor."""
    packed = [packing.compress(_words_of(total)) for total in self.totals]
    # Each total has its length before it, by which `_split` finds the next one.
    sized = [np.append(np.uint32(words.size), words) for words in packed]
    words = np.concatenate([np.empty(0, np.uint32), *sized])
    self.totals = ()
    self.nbytes = words.nbytes
    self.words = words if self.nbytes < most else None

  def follow(self, outer: OuterStep, anchor: Anchor) -> Anchor:
    """`anchor` after this round, by its totals alone; the residual of this worker stays."""
    # The outer step was skipped, and has no totals.
    if not self.members:
      return outer.follow(anchor, self.size, self.number)[0]
    assert self.words is not None
    parts = _split(self.words)  # one total after the other
    # Reads as many totals as the outer step has; what links moved is left in `parts`.
    take = lambda likes: [_array_of(next(parts), like) for like in likes]
    after, fragment = outer.follow(anchor, self.size, self.number, take)
    leaves = outer.fragments.part(anchor.params, fragment)
    like = flatten(leaves)[0]  # f32[n], the shape of what a link moved
    # Behind the totals of the outer step comes what links have moved.
    for words in parts:
      after = subtract(outer, after, leaves, _array_of(words, like))
    after = after.has_moved(self.members, self.number)
    # `has_moved` sets `residual_group` to this round, as for a member whose residual is
    # new: here the residual stays, and so does its group.
    return after._replace(residual_group=anchor.residual_group)


def pack(start: Lineage, links: list[RoundLink]) -> np.ndarray:
  """u32[m]: links from the round of `start` on, all of them packed."""
  # the last field: words of the link
  fields = [(link.number, link.size, link.members, link.nbytes // 4) for link in links]
  text = json.dumps([start.round, start.id, fields])
  # JSON ignores the spaces that fill the last word.
  header = np.frombuffer((text + " " * (-len(text) % 4)).encode(), np.uint32)
  first = np.array([0, header.size], np.uint32)
  return np.concatenate([first, header, *(link.words for link in links)])


def parse(words: np.ndarray) -> tuple[Lineage, list[RoundLink]]:
  """The inverse of `pack`: `start`, and the links, packed; the words come from another worker.

  Raises:
    ValueError: for words without a header as `pack` makes it; for some of them
      IndexError or TypeError. The caller refuses the words then.
  """
  end = _START + int(words[1])
  round_, id_, fields = strict_json.parse(words[_START:end].tobytes())
  links = []
  for group, size, members, length in fields:
    are_whole = map(strict_json.is_whole, (group, size, length, round_, id_, *members))
    if not all(are_whole) or not 0 < size <= MOST_MEMBERS:
      raise ValueError(f"no link: {size} members {members}")
    # Missing words are not noticed here: `follow` then fails, or its anchor has another
    # digest.
    packed = words[end : end + length]
    links.append(RoundLink(group, size, tuple(members), (), packed, packed.nbytes))
    end += length
  return Lineage(round_, (id_,)), links


def _words_of(array: np.ndarray) -> np.ndarray:
  """u32[m], the bytes of an array of any dtype, with zeros up to a whole word."""
  flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  return np.pad(flat, (0, -flat.size % 4)).view(np.uint32)


def _array_of(words: np.ndarray, like: Any) -> np.ndarray:
  """The array from `words`: the inverse of `_words_of` and then `packing.compress`.

  Args:
    words: u32[m], compressed.
    like: has the shape and dtype of the array.
  """
  size = like.size * like.dtype.itemsize  # bytes
  # `expand` needs the number of words, rounded up; the padding is cut off.
  array = packing.expand(words, -(-size // 4)).view(np.uint8)[:size]
  return array.view(like.dtype).reshape(like.shape)


def _split(words: np.ndarray) -> Iterator[np.ndarray]:
  """The pieces of u32 words, each of which has its length in the word before it, as `RoundLink.pack` makes them."""
  while words.size:
    size = int(words[0])
    yield words[1 : 1 + size]
    words = words[1 + size :]
