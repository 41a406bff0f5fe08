"""Drawing the next token of every slot. Shape suffixes: B slots, V vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def sample(
    logits_BxV: Float[Array, "B V"],
    keys_B: Key[Array, "B"],
    temperature_B: Float[Array, "B"],
    top_k_B: Int[Array, "B"],
    top_p_B: Float[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draw one token a row and say how likely it was.

    A row depends on its own logits, key and settings alone. Drawn as argmax(logits / temperature + Gumbel noise),
    on the tokens that `top_k` (0: all) and then `top_p` (1: all) leave. Temperature 0 takes the most likely token,
    the first of equals.

    Returns (ids, logprobs). The log-probability is the natural logarithm under the distribution that was sampled
    from: temperature and cuts included. A greedy token has no such distribution; it gets its log-probability at
    temperature 1 over the whole vocabulary. NaN or +inf among the logits gives a NaN log-probability.
    """
    logits_BxV = logits_BxV.astype(jnp.float32)
    drawn_B = temperature_B > 0
    scaled_BxV = logits_BxV / jnp.where(drawn_B, temperature_B, 1.0)[:, None]
    cut_B = drawn_B & ((top_k_B > 0) | (top_p_B < 1.0))
    support_BxV = jax.lax.cond(
        jnp.any(cut_B),
        lambda x: jnp.where(cut_B[:, None], cut(x, top_k_B, top_p_B), x),
        lambda x: x,
        scaled_BxV,
    )

    # mode "low" takes a third of the time of the default on a CPU; they differ in noise above 16, which
    # one draw in 10^7 reaches.
    def noisy(x_BxV: Array) -> Array:
        noise_BxV = jax.vmap(lambda key: jax.random.gumbel(key, x_BxV.shape[1:], mode="low"))(
            keys_B
        )
        return x_BxV + jnp.where(drawn_B[:, None], noise_BxV, 0.0)

    ids_B = jnp.argmax(jax.lax.cond(jnp.any(drawn_B), noisy, lambda x: x, support_BxV), axis=-1)
    chosen_B = jnp.take_along_axis(support_BxV, ids_B[:, None], axis=-1)[:, 0]
    return ids_B.astype(jnp.int32), chosen_B - jax.nn.logsumexp(support_BxV, axis=-1)


def cut(
    logits_BxV: Float[Array, "B V"], top_k_B: Int[Array, "B"], top_p_B: Float[Array, "B"]
) -> Float[Array, "B V"]:
    """-inf for what top-k and nucleus sampling (Holtzman et al. 2020) leave out.

    Top-k first; top-p then keeps the most likely tokens until their renormalised probability reaches `top_p`, the
    token that reaches it included. Tokens as likely as the last one kept are kept too.
    """
    vocabulary = logits_BxV.shape[-1]
    sorted_BxV = -jnp.sort(-logits_BxV, axis=-1)
    k_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, vocabulary), vocabulary)
    in_k_BxV = jnp.arange(vocabulary) < k_B[:, None]
    p_BxV = jax.nn.softmax(jnp.where(in_k_BxV, sorted_BxV, -jnp.inf), axis=-1)
    before_BxV = jnp.cumsum(p_BxV, axis=-1) - p_BxV
    # top_p 1 must not lose the tail to rounding in the running sum.
    kept_BxV = in_k_BxV & ((before_BxV < top_p_B[:, None]) | (top_p_B[:, None] >= 1.0))
    last_B = jnp.maximum(jnp.sum(kept_BxV, axis=-1) - 1, 0)
    threshold_Bx1 = jnp.take_along_axis(sorted_BxV, last_B[:, None], axis=-1)
    return jnp.where(logits_BxV >= threshold_Bx1, logits_BxV, -jnp.inf)
