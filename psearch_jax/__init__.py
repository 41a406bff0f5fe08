"""psearch_jax: reinforcement learning of parallel search in JAX."""

__version__ = "0.1.0"
