"""Losses and their gradients against TRL's on the same tensors. Skipped where TRL is not installed.

TRL's `_compute_loss` is called on a stand-in trainer whose model is a table of logits.
"""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning.test_objective import V, stub_score

from psearch_jax.config import AlgorithmConfig
from psearch_jax.learning.aggregation import denominator
from psearch_jax.learning.batches import Batch
from psearch_jax.learning.corrections import correction_weights
from psearch_jax.learning.objective import make_policy_loss

torch = pytest.importorskip("torch")
grpo = pytest.importorskip("trl.trainer.grpo_trainer")

B, T, PROMPT = 4, 7, 2
LONGEST = 9
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(B, PROMPT + T, V)).astype(np.float32)
REFERENCE = LOGITS + 0.5 * RNG.normal(size=LOGITS.shape).astype(np.float32)
IDS = RNG.integers(0, V, (B, PROMPT + T))
#: Episodes of several lengths; what a tool wrote in the middle of them counts nothing.
WRITTEN = np.arange(T) < np.array([[7], [5], [6], [2]])
POLICY = WRITTEN & (RNG.random((B, T)) < 0.7)
POLICY[:, 0] = True
ADVANTAGES = np.array([1.0, -0.7, 0.4, -1.2], np.float32)
OLD = (-1.6 + 0.5 * RNG.normal(size=(B, T))).astype(np.float32)

#: TRL's settings, and ours.
CASES = {
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"clip_high": 0.28},
    ),
    "grpo with KL": (
        {"loss_type": "grpo", "beta": 0.3},
        {"aggregation": "sequence_mean", "kl_coefficient": 0.3},
    ),
    "two-sided clip": (
        {"loss_type": "dapo", "delta": 1.5},
        {"clip_dual": 1.5},
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo"},
        {"aggregation": "fixed_length", "fixed_length": LONGEST},
    ),
    "gspo": (
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
        {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.05, "clip_high": 0.1},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.4},
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.4},
    ),
    "entropy": (
        {"loss_type": "dapo", "entropy_coef": 0.1},
        {"entropy_coefficient": 0.1},
    ),
    "token correction": (
        {"loss_type": "dapo", "correction": "token", "cap": 1.3},
        {"old_logprobs": "trainer", "correction": "token", "correction_cap": 1.3},
    ),
    "sequence correction": (
        {"loss_type": "grpo", "correction": "sequence", "cap": 0.3},
        {
            "aggregation": "sequence_mean",
            "old_logprobs": "trainer",
            "correction": "sequence",
            "correction_cap": 0.3,
        },
    ),
}


def torch_scores(logits):
    """[B, T] log-probabilities and entropies of the completion."""
    table = torch.log_softmax(logits, -1)[:, PROMPT - 1 : -1]
    ids = torch.as_tensor(IDS[:, PROMPT:])
    return table.gather(-1, ids[..., None])[..., 0], -(table.exp() * table).sum(-1)


def trl_loss(
    loss_type,
    *,
    epsilon_low=0.2,
    epsilon_high=0.2,
    beta=0.0,
    delta=None,
    level="token",
    entropy_coef=0.0,
    correction="",
    cap=0.0,
):
    logits = torch.tensor(LOGITS, requires_grad=True)
    same = SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=False
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (*torch_scores(logits), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        use_vllm=bool(correction),
        vllm_importance_sampling_correction=bool(correction),
        model=SimpleNamespace(training=False),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        accelerator=same,
        _entropy_bonus_enabled=entropy_coef > 0,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.as_tensor(IDS[:, :PROMPT]),
        "prompt_mask": torch.ones(B, PROMPT),
        "completion_ids": torch.as_tensor(IDS[:, PROMPT:]),
        "completion_mask": torch.as_tensor(WRITTEN.astype(np.float32)),
        "tool_mask": torch.as_tensor(POLICY.astype(np.float32)),
        "advantages": torch.as_tensor(ADVANTAGES),
        "num_items_in_batch": torch.tensor(float(POLICY.sum())),
        "old_per_token_logps": torch.as_tensor(OLD),
        "ref_per_token_logps": torch_scores(torch.as_tensor(REFERENCE))[0],
    }
    if correction:
        # As its rollout does it: the ratio is taken against the trainer's own old log-probabilities.
        own = torch_scores(logits)[0].detach()
        gap = (own - torch.as_tensor(OLD)) * torch.as_tensor(POLICY.astype(np.float32))
        gap = gap.sum(-1, keepdim=True) if correction == "sequence" else gap
        inputs["importance_sampling_ratio"] = gap.exp().clamp(max=cap)
        inputs["old_per_token_logps"] = own
    loss = grpo.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logits.grad.numpy()


def our_batch():
    def whole(x_BxT):
        return jnp.asarray(np.pad(x_BxT.astype(np.float32), ((0, 0), (PROMPT, 0))))

    written = np.pad(WRITTEN, ((0, 0), (PROMPT, 0)), constant_values=True)
    return Batch(
        tokens_RxL=jnp.asarray(IDS, jnp.int32),
        positions_RxL=jnp.broadcast_to(jnp.arange(PROMPT + T), IDS.shape),
        segments_RxL=jnp.asarray(written.astype(np.int32)),
        weights_RxL=whole(POLICY),
        advantages_RxL=jnp.broadcast_to(jnp.asarray(ADVANTAGES)[:, None], IDS.shape),
        old_logprobs_RxL=whole(OLD),
    )


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_of_trl(name):
    theirs, ours = CASES[name]
    want, slope = trl_loss(**theirs)
    config, batch = AlgorithmConfig(**ours), our_batch()
    weight = denominator(config.aggregation, batch, config.fixed_length)
    (got, _), grad = jax.value_and_grad(make_policy_loss(stub_score, config), has_aux=True)(
        jnp.asarray(LOGITS), batch, weight, jnp.asarray(REFERENCE)
    )
    assert float(got) == pytest.approx(want, abs=1e-5)
    np.testing.assert_allclose(grad, slope, atol=1e-5)
    assert np.abs(slope).max() > 1e-2  # the case has something to say
    if config.correction != "none":
        own = stub_score(jnp.asarray(LOGITS), batch, "none").logprobs_RxL
        weights = np.asarray(correction_weights(config, own, batch))[:, PROMPT:][POLICY]
        cap = np.float32(config.correction_cap)
        assert (weights == cap).any() and (weights < cap).any()
