"""The file of a worker's parameters: written when the controller is lost, read by `restore`.

The content is written to a temporary file in the same folder, which is renamed when it
is complete: the final name always holds either the former content or the new one, in
full. The next worker with the same final name removes the temporary file of a process
that was killed while it wrote.
"""

import contextlib
import glob
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse.arrays.flatten import leaf_shapes, leaves_by_name


def save(path: pathlib.Path | None, params: optax.Params, iteration: int) -> str:
  """Saves a worker's trained parameters for `restore`; returns a sentence that says where, or why not.

  Nothing is saved if `path` is None, or `iteration` is 0: nothing has been trained.
  Leaves are saved as float32, as averages are: numpy's file format has no bfloat16.

  Example:
    >>> save(None, {"w": np.ones(2)}, 7)
    'nothing is saved, since no file was given (save=)'
  """
  if path is None or not iteration:
    return f"nothing is saved, since {'no file was given (save=)' if iteration else 'nothing has been trained'}"
  content: dict[str, Any] = {
    name: np.asarray(leaf, np.float32) for name, leaf in leaves_by_name(params).items()
  }
  temporary = path.with_name(f".{path.name}.{os.getpid()}.npz")
  try:
    with temporary.open("wb") as file:
      np.savez(file, **content, iteration=np.asarray(iteration))
      file.flush()
      # else a crash of the machine could leave the new name without the content
      os.fsync(file.fileno())
    temporary.replace(path)
  except OSError as error:
    return f"the parameters could not be saved: {error}"
  finally:
    remove_temporary(path)
  return f"the parameters of iteration {iteration} are in {path}"


def remove_temporary(path: pathlib.Path) -> None:
  """Removes temporary files of `path`."""
  with contextlib.suppress(OSError):  # no permission: `save` says so
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.npz"):
      temporary.unlink(missing_ok=True)


def restore(
  path: str | os.PathLike[str], like: optax.Params
) -> tuple[optax.Params, int]:
  """Reads the parameters and the iteration that a worker saved when its controller was lost.

  Args:
    path: the file.
    like: parameters of the same structure, shapes and dtypes.

  Returns:
    The parameters and the iteration.

  Raises:
    ValueError: if the file holds another model.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   np.savez(f"{folder}/saved.npz", iteration=7, **{"['w']": np.ones(2, np.float32)})
    ...   restore(f"{folder}/saved.npz", {"w": jnp.zeros(2)})
    ({'w': Array([1., 1.], dtype=float32)}, 7)
  """
  with np.load(path) as file:
    saved = dict(file)
  # shapes by name: of each leaf, and () of the scalar "iteration"
  held = {name: value.shape for name, value in saved.items()}
  wanted = leaf_shapes(like)
  if held != {**wanted, "iteration": ()}:
    raise ValueError(
      f"{path} holds arrays of the shapes {held}, the model's are {wanted}"
    )
  leaves = [
    jnp.asarray(saved[name], jnp.result_type(leaf))
    for name, leaf in leaves_by_name(like).items()
  ]
  params = jax.tree.unflatten(jax.tree.structure(like), leaves)
  return params, int(saved["iteration"])
