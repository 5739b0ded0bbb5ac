"""Compiled programs that the ranks of a run share and later runs find again: JAX's persistent compilation cache."""

import pathlib

import jax


def share(folder: pathlib.Path) -> None:
  """From now on keeps every compiled program in `folder`, and has one rank compile for all; call it before `here`.

  In a run of JAX's multi-process runtime rank 0 compiles a program or reads it from `folder`, and sends the binary to
  the ranks that miss it. That takes the same cache key on all ranks: on CPU, JAX hashes the devices of the process
  that asks, so the key of each rank differs and no rank but 0 would ever hit. Here the kinds of all devices are hashed
  instead. The function that is replaced is private to JAX: where a version lacks it, every rank compiles for itself.

  Ranks of MPI compile for themselves: mpi4jax writes the address of the communicator, which differs from process to
  process, into every program that sends. Only programs without messages are found again.
  """
  jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  from jax._src import cache_key

  if hasattr(cache_key, "_hash_accelerator_config") and hasattr(cache_key, "_hash_devices"):
    setattr(cache_key, "_hash_accelerator_config", cache_key._hash_devices)  # noqa: B010  # private, so untyped
    jax.config.update("jax_share_binary_between_hosts", True)
