"""A collective as an `optax.GradientTransformation`: its state, its update, its metrics, local parameters."""
