"""A decoder of a few hundred weights, random sequences, and the losses written out the plain way."""

import jax
import jax.numpy as jnp
import numpy as np

from psearch_jax.learning.batches import Sequence
from psearch_jax.models.decoder import DecoderConfig, hidden_states, init_params, unembed

VOCABULARY = 16
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)
GRAPHDEF, PARAMS = init_params(CONFIG, jax.random.key(0))
LENGTHS = (5, 9)  # few, because each is a compilation of the plain forward pass


def make_sequences(count: int, seed: int = 0) -> list[Sequence]:
    """Random ids, roles, advantages and old log-probabilities near those of a fresh policy."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        n = int(rng.choice(LENGTHS))
        weights = (rng.random(n) < 0.6).astype(np.float32)
        weights[-1] = 1.0
        sequences.append(
            Sequence(
                ids=rng.integers(0, VOCABULARY, n),
                weights=weights,
                advantages=rng.normal(size=n).astype(np.float32),
                old_logprobs=(-np.log(VOCABULARY) + 0.3 * rng.normal(size=n)).astype(np.float32),
            )
        )
    return sequences


def plain_scores(params, sequence: Sequence, temperature: float = 1.0):
    """Log-probabilities and entropies of tokens 1… of one sequence alone, without padding or chunks."""
    return _plain_scores(params, jnp.asarray(sequence.ids, jnp.int32)[None], temperature)


@jax.jit
def _plain_scores(params, ids_1xL, temperature):
    L = ids_1xL.shape[1]
    hidden_1xLxD = hidden_states(
        GRAPHDEF, params, ids_1xL, jnp.arange(L)[None], jnp.ones((1, L), jnp.int32)
    )
    table_LxV = jax.nn.log_softmax(unembed(GRAPHDEF, params, hidden_1xLxD)[0] / temperature)
    logprobs_L = table_LxV[jnp.arange(L - 1), ids_1xL[0, 1:]]
    return logprobs_L, -jnp.sum(jnp.exp(table_LxV) * table_LxV, axis=-1)[:-1]


def largest_difference(a, b) -> float:
    """Between two trees of arrays."""
    return max(
        float(np.max(np.abs(np.asarray(x) - np.asarray(y))))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
