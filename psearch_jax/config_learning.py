"""The sections of the configuration about judging and learning; `psearch_jax.config` has the others."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RewardParts:
    """Weights of the rewards that `reward.name: composed` adds up; 0 leaves one out."""

    exact_match: float = 0.0
    f1: float = 0.0
    substring: float = 0.0
    format: float = 0.0
    search_r1_format: float = 0.0
    research: float = 0.0
    research_paper: float = 0.0
    parallel_search: float = 0.0
    parallel_search_paper: float = 0.0
    gated: float = 0.0
    gain: float = 0.0
    judge: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A language model that compares answers, behind an OpenAI-compatible endpoint."""

    endpoint: str = ""  # as in http://host:8000/v1
    model: str = ""  # its name there
    key_variable: str = ""  # the environment variable that holds the key; empty: no key is sent
    cache: str = "runs/judge.sqlite"  # judgements are kept here; empty: nowhere
    timeout: float = 30.0  # seconds of one call
    retries: int = 2  # after a failed call
    concurrency: int = 8  # calls at one time
    reply_tokens: int = 256
    give_up_after: int = 8  # failures in a row after which no more of a batch are tried
    fallback: float = 0.0  # what an answer is worth that could not be judged


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How an episode is judged, by name.

    "exact_match" (Search-R1), "f1", "substring", "format" (1 if well formed), "search_r1_format", "research" (as its
    code has it), "research_paper" (its formula), "parallel_search" (as released), "parallel_search_paper" (its
    formula), "gated", "gain", "judge", or "composed": the weighted sum of `parts`.
    """

    name: str = "exact_match"
    lambda_decomposition: float = 0.15
    alpha_decomposition: float = 3.0
    lambda_search: float = 0.35
    lambda_format: float = 0.1
    # Right and well formed, right only, well formed only, neither, no answer.
    search_r1_scores: tuple[float, float, float, float, float] = (1.0, 0.8, 0.2, 0.1, 0.0)
    research_format: float = 0.1  # for a well-formed answer that shares no word with a gold one
    gated_turns: float = 0.3  # weight of the turn rank within the group, right answers only
    gated_subqueries: float = (
        0.1  # weight of the sub-query rank within the group, right answers only
    )
    gain_weight: float = 0.4  # of the share of the gold evidence that single sub-queries brought in
    gain_waste: float = 0.2  # that duplicates and empty fan-out cost at most
    parts: RewardParts = field(default_factory=RewardParts)
    judge: JudgeConfig = field(default_factory=JudgeConfig)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """name: "adam" or "muon" (matrices by Muon, the rest by Adam). Schedules: "constant", "cosine", "linear"."""

    name: str = "adam"
    learning_rate: float = 3e-4
    adam_learning_rate: float = 3e-4  # of the tensors that Muon leaves to Adam
    schedule: str = "constant"
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How the policy changes: advantage, loss and what the loss is the mean over, by name."""

    # "grpo" (against the group's mean), "rloo" (against the other members' mean), "reinforce" (against the batch's
    # mean) or "gae" (against a critic's values).
    advantage: str = "grpo"
    normalize_std: bool = True  # divide by the std of the group; reinforce, gae: of the batch
    gamma: float = 1.0  # of gae, from policy token to policy token
    gae_lambda: float = 1.0
    value_clip: float = 0.5  # how far the critic moves from its values at the rollout; 0: no bound
    # A trunk of the critic's own, which has its own optimiser ("separate"), or a value head on the policy, which one
    # optimiser trains on the sum of both losses ("shared").
    critic: str = "separate"
    value_coefficient: float = 0.5  # of the value loss in that sum
    critic_learning_rate: float = 1e-5
    critic_warmup_steps: int = 0
    # "clipped" (PPO), "gspo" (one ratio a sequence) or "cispo" (clipped weights, no token silenced).
    loss: str = "clipped"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 0.0  # the loss of a bad advantage is at most this many times it; 0: no bound
    kl_coefficient: float = 0.0  # 0 keeps no reference parameters in memory
    kl_estimator: str = "k3"  # "k1", "k2" or "k3"
    kl_place: str = "loss"  # "loss" or "reward"
    kl_target: float = 0.0  # nats a token that the coefficient is adapted to; 0: it stays
    kl_horizon: float = 10000.0  # episodes in which an adapted coefficient changes by 20 %
    entropy_coefficient: float = 0.0
    # Whose log-probabilities the ratio is taken against: the "rollout"'s or the "trainer"'s own of the same policy.
    old_logprobs: str = "rollout"
    # Weights trainer / rollout on the advantages where old_logprobs is trainer: "none", "token" or "sequence".
    correction: str = "none"
    correction_cap: float = 2.0  # the largest weight; 0: any
    correction_low: float = 0.0  # a smaller ratio counts nothing; 0: no bound
    correction_high: float = 0.0  # a larger ratio counts nothing; 0: no bound
    minibatches: int = 1  # optimiser steps a rollout batch
    aggregation: str = "token_mean"  # or "sequence_mean" or "fixed_length"
    fixed_length: int = 0  # policy tokens that an episode counts as, of fixed_length
    overlong_filter: bool = False  # episodes cut off by a budget or the context teach nothing
    overlong_buffer: int = (
        0  # in the last tokens of rollout.context the reward falls; 0: it does not
    )
    overlong_penalty: float = 1.0  # by how much at the end of the context
    refill_rounds: int = 0  # rounds of new questions in place of groups without spread
    row_length: int = 512  # packed rows
    micro_rows: int = 16  # rows of one micro-batch
    logprob_chunk: int = 1024  # tokens whose logits exist at one time


@dataclass(frozen=True, kw_only=True)
class CollapseConfig:
    """Signs of a policy that falls apart; one of 0 is not looked for, and none is unless it is asked for.

    A run that shows a sign in `window` steps in a row goes back to its last good checkpoint with a lower learning
    rate, `returns` times; then it stops.
    """

    entropy_below: float = 0.0  # nats a token
    gap_above: float = 0.0  # mean |log-ratio| a token between rollout and trainer
    search_rate_below: float = 0.0  # share of episodes that search
    invalid_above: float = 0.0  # share of turns that neither search nor answer
    reward_drop: float = 0.0  # below the best mean of `window` steps
    window: int = 3  # steps in a row
    returns: int = 2  # to a good checkpoint, before the run stops
    rate_factor: float = 0.5  # of the learning rate at each return


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop."""

    steps: int = 30
    questions_per_step: int = 12
    group_size: int = 8
    seed: int = 0
    checkpoint_every: int = 10
    keep: int = 2  # of the newest checkpoints
    keep_best: bool = True  # and the one whose steps earned the highest mean reward
    keep_every: int = 0  # and those at multiples of so many steps; 0: none
    max_bad_batches: int = 3
    log_episodes: int = 8  # episodes of every step that are kept in episodes.jsonl, for the report
    kinds: tuple[str, ...] = ()  # train on these question kinds only; empty: all
    collapse: CollapseConfig = field(default_factory=CollapseConfig)


@dataclass(frozen=True, kw_only=True)
class ArchitectureConfig:
    """Sizes of a policy that starts from random weights (Qwen2 architecture, tied embeddings)."""

    vocab_size: int = 1536
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """The supervised stage, over scripted episodes or those of a file."""

    # A policy to start from, as `policy` names one, whose tokenizer stays; empty: random weights of `architecture`.
    start: str = ""
    widen_to: int = 0  # hidden units that each MLP of `start` grows to before training; 0: none
    # A file of episodes, as `psearch sample` writes, of which the policy's tokens are learned; empty: scripted ones.
    episodes: str = ""
    architecture: ArchitectureConfig = field(default_factory=ArchitectureConfig)
    steps: int = 1000
    rows_per_step: int = 16
    row_length: int = 384
    micro_rows: int = 16
    seed: int = 0
    checkpoint_every: int = 200
    keep: int = 2
    check_every: int = 100  # steps between checks on unseen entities
    # Shares of the styles: sequential, parallel, without search, passages given beforehand.
    styles: tuple[float, ...] = (0.48, 0.29, 0.19, 0.04)
    real_share: float = 0.35  # of episodes about the seen part of the real world; the others are about shadow worlds
    steps_per_world: int = 25  # training steps that share one shadow world
    drill_steps: int = 500  # at first nothing but copying and comparison drills
    drill_share: float = 0.4  # of later sequences; drills are short, so this is fewer tokens
    drill_shared: float = 0.2  # of the drills ask whether two things share something
    answer_weight: float = 3.0  # of the tokens of an answer that follows from a comparison
    observation_weight: float = 0.2  # of the tokens of what was retrieved


@dataclass(frozen=True, kw_only=True)
class RejectionConfig:
    """Rejection sampling (`psearch sample`): `policy` plays, and episodes with the right answer are kept."""

    split: str = "train"
    questions: int = 0  # of the split, from its beginning; 0: all
    samples: int = 4  # episodes a question
    keep: int = 1  # of a question, at most
    well_formed: bool = True  # keep well-formed episodes only
    seed: int = 0
    questions_at_once: int = 64  # between two writes; what a kill loses at most
