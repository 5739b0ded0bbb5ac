"""The file of a worker's parameters: written when the controller is lost, read by `restore`.

The content is written to a temporary file in the same folder, which is renamed when it is complete: the final name
always holds either the former content or the new one, in full. The next worker with the same final name removes the
temporary file of a process that was killed while it wrote.
"""

import contextlib
import glob
import os
import pathlib
from typing import Any

import jax
import numpy as np


def save(path: pathlib.Path | None, params: Any, iteration: int) -> str:
  """Saves a worker's parameters for `restore`, if there are trained ones; says where, or why not.

  Leaves are saved as float32, as averages are: numpy's file format has no bfloat16.

  Example:
    >>> save(None, {"w": np.ones(2)}, 7)
    'nothing is saved, since no file was given (save=)'
  """
  if not iteration:
    return "nothing is saved, since nothing has been trained"
  if path is None:
    return "nothing is saved, since no file was given (save=)"
  leaves = jax.tree_util.tree_leaves_with_path(params)
  content: dict[str, Any] = {jax.tree_util.keystr(name): np.asarray(leaf, np.float32) for name, leaf in leaves}
  temporary = path.with_name(f".{path.name}.{os.getpid()}.npz")
  try:
    with temporary.open("wb") as file:
      np.savez(file, **content, iteration=np.asarray(iteration))
      file.flush()
      os.fsync(file.fileno())  # or a crash of the machine could leave the new name without the content
    temporary.replace(path)
  except OSError as error:
    return f"the parameters could not be saved: {error}"
  finally:
    remove_temporary(path)
  return f"the parameters of iteration {iteration} are in {path}"


def remove_temporary(path: pathlib.Path) -> None:
  """Removes temporary files of `path`."""
  with contextlib.suppress(OSError):  # no permission: `save` says so
    for other in path.parent.glob(f".{glob.escape(path.name)}.*.npz"):
      other.unlink(missing_ok=True)


def restore(path: str | os.PathLike[str], like: Any) -> tuple[Any, int]:
  """Reads the parameters and the iteration that a worker saved when its controller was lost.

  Args:
    path: the file.
    like: parameters of the same structure, shapes and dtypes.

  Returns:
    The parameters and the iteration.

  Raises:
    ValueError: if the file holds another model.

  Example:
    >>> import tempfile, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   np.savez(f"{folder}/saved.npz", iteration=7, **{"['w']": np.ones(2, np.float32)})
    ...   restore(f"{folder}/saved.npz", {"w": jnp.zeros(2)})
    ({'w': Array([1., 1.], dtype=float32)}, 7)
  """
  with np.load(path) as file:
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    model = {jax.tree_util.keystr(leaf_path): leaf for leaf_path, leaf in paths}
    saved = {name: file[name] for name in file.files}
  if sorted([*model, "iteration"]) != sorted(saved):
    raise ValueError(f"{path} holds {', '.join(sorted(saved))}, the model has {', '.join(model)}")
  for name, leaf in model.items():
    if saved[name].shape != np.shape(leaf):
      raise ValueError(f"{path} holds {name} of shape {saved[name].shape}, the model's has {np.shape(leaf)}")
  leaves = [jax.numpy.asarray(saved[name], jax.numpy.result_type(leaf)) for name, leaf in model.items()]
  return jax.tree.unflatten(structure, leaves), int(saved["iteration"])
