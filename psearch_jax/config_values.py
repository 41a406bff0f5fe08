"""What single values of the configuration may be: names to choose from, and numbers with bounds."""

from __future__ import annotations

from dataclasses import fields

from psearch_jax.config import RewardParts

#: Settings with a fixed list of values.
CHOICES: dict[str, tuple[str, ...]] = {
    "data.bad_rows": ("readable", "skip", "refuse"),
    "retrieval.embed": ("text", "contents"),
    "retrieval.kind": ("scann", "exact", "bm25", "hybrid", "none"),
    "retrieval.dialect": ("retrieve", "batch_search"),
    "retrieval.web.engine": ("", "serpapi", "google", "brave", "tavily"),
    "retrieval.device_matrix": ("none", "bfloat16", "int8"),
    "retrieval.pooling": ("auto", "mean", "cls"),
    "retrieval.encoder_dtype": ("float32", "bfloat16"),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.compute_dtype": ("auto", "float32", "bfloat16"),
    "model.remat": ("none", "dots", "attention", "full"),
    "model.attention": ("auto", "plain", "dot_product", "splash"),
    "rollout.dtype": ("auto", "float32", "bfloat16"),
    "rollout.attention": (
        *("auto", "plain", "paged_attention", "ragged_paged_attention", "decode_attention"),
    ),
    "protocol.opening": ("last", "first"),
    "protocol.query_form": ("text", "tool_call"),
    "protocol.answer_form": ("whole", "boxed"),
    "protocol.format": ("strict", "paired"),
    "reward.name": (*(field.name for field in fields(RewardParts)), "composed"),
    "optimizer.name": ("adam", "muon"),
    "optimizer.schedule": ("constant", "cosine", "linear"),
    "algorithm.advantage": ("grpo", "rloo", "reinforce", "gae"),
    "algorithm.critic": ("separate", "shared"),
    "algorithm.loss": ("clipped", "gspo", "cispo"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.kl_place": ("loss", "reward"),
    "algorithm.old_logprobs": ("rollout", "trainer"),
    "algorithm.correction": ("none", "token", "sequence"),
    "algorithm.aggregation": ("token_mean", "sequence_mean", "fixed_length"),
    "tracking.wandb_mode": ("online", "offline"),
    "rejection.split": ("train", "dev", "test"),
    "evaluation.split": ("train", "dev", "test"),
    "evaluation.baseline": ("", "direct", "cot", "rag", "ircot", "iter_retgen", "search_o1", "r1"),
}

#: Settings that must be above zero. Every other number may be zero, and only `ANY_SIGN` below it.
ABOVE_ZERO = frozenset(
    (
        *(
            "mesh.fsdp",
            "mesh.tensor",
            "mesh.sequence",
            "model.lora_alpha",
            "retrieval.embed_batch_tokens",
            "retrieval.rerank_depth",
            "retrieval.call_timeout",
            "retrieval.web.calls_per_second",
            "retrieval.web.call_timeout",
        ),
        *("protocol.max_subqueries", "protocol.top_k", "protocol.observation_tokens"),
        *("reward.judge.timeout", "reward.judge.concurrency", "reward.judge.reply_tokens"),
        *("reward.judge.give_up_after", "retrieval.timeout", "retrieval.concurrency"),
        *("protocol.turn_tokens", "sampling.top_p", "rollout.context"),
        *("rollout.decode_block", "optimizer.learning_rate", "optimizer.adam_learning_rate"),
        *("algorithm.minibatches", "algorithm.row_length", "algorithm.micro_rows"),
        *("algorithm.logprob_chunk", "trainer.questions_per_step", "trainer.group_size"),
        *("algorithm.critic_learning_rate", "algorithm.value_coefficient", "algorithm.kl_horizon"),
        *("evaluation.samples", "evaluation.bootstrap"),
        *("rejection.samples", "rejection.keep", "rejection.questions_at_once"),
        *("trainer.collapse.window", "trainer.collapse.rate_factor"),
        *("trainer.checkpoint_every", "trainer.keep", "supervised.rows_per_step"),
        *("supervised.row_length", "supervised.micro_rows", "supervised.checkpoint_every"),
        *("supervised.keep", "supervised.check_every", "supervised.steps_per_world"),
        *("supervised.architecture.vocab_size", "supervised.architecture.hidden_size"),
        *("supervised.architecture.intermediate_size", "supervised.architecture.num_layers"),
        *("supervised.architecture.num_heads", "supervised.architecture.num_kv_heads"),
        *("supervised.architecture.head_dim",),
    )
)
ANY_SIGN = frozenset(("mesh.data",))
#: Shares, which end at 1.
SHARES = frozenset(
    (
        *("sampling.top_p", "optimizer.b1", "optimizer.b2", "algorithm.clip_low"),
        *("algorithm.gamma", "algorithm.gae_lambda", "algorithm.correction_low"),
        *("reward.judge.fallback", "trainer.collapse.rate_factor"),
        *("trainer.collapse.search_rate_below", "trainer.collapse.invalid_above"),
        *("supervised.real_share", "supervised.drill_share", "supervised.drill_shared"),
    )
)
