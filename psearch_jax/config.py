"""Everything that can be configured, as frozen dataclasses. Reading and merging: config_files.py.

A value of a section is read by the room of the same name. Paths are relative to where the command runs.
The word `embedded` as a path stands for what the package ships or makes itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Mesh axis sizes; their product is the number of devices. -1 in `data` takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Questions: a directory with train/dev/test .jsonl in FlashRAG's format, or `embedded`."""

    questions: str = "embedded"
    seed: int = 0  # of the order of the training questions


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """The corpus, the index over it and how it is searched."""

    corpus: str = "embedded"  # a FlashRAG corpus .jsonl or `embedded`
    encoder: str = "all-MiniLM-L6-v2"  # a directory, or this name for the packaged model
    embed: str = "text"  # what is embedded of a passage: "text" or "contents" (with its title)
    # A regular expression; what it matches is not embedded. Here the numbers of the embedded world: no query holds
    # one, and without them "Lyon" is found before "Lyon 06".
    embed_without: str = r" 10\^-?\d+\*[\d.]+"
    kind: str = "scann"  # "scann", "exact" or "none" (index switched off)
    directory: str = "runs/index"  # indexes are kept here under their fingerprint
    cache_size: int = 65536  # LRU entries (query, k)
    retries: int = 2  # after a failed search
    embed_batch_tokens: int = 2048


@dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
    """How an episode is written: tags, separator, rendering, limits."""

    name: str = "embedded"
    think: tuple[str, str] = ("<think>", "</think>")
    search: tuple[str, str] = ("<search>", "</search>")
    information: tuple[str, str] = ("<information>", "</information>")
    answer: tuple[str, str] = ("<answer>", "</answer>")
    separator: str = "##"  # empty: a search holds one query
    prompt: str = "{question}\n"
    attributed: bool = True  # results say which sub-query they answer
    label: str = "{query_number}:"  # written before the passages of a sub-query when attributed
    passage: str = "{text}"  # fields: title, text, number
    no_results: str = "none"
    feedback: str = "?\n"  # appended after a turn that neither searches nor answers
    before_information: str = ""
    after_information: str = ""
    max_search_turns: int = 4
    max_subqueries: int = 4
    top_k: int = 3
    observation_tokens: int = (
        200  # retrieved text of one turn, shared fairly between its sub-queries
    )
    turn_tokens: int = 64  # policy tokens of one turn


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """temperature 0 is greedy; top_k 0 and top_p 1 switch the cuts off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The engine: seats, sequence length, shapes."""

    slots: int = 96
    context: int = 512  # tokens of one episode, prompt and observations included
    decode_block: int = 16  # decoding steps of one device call at most
    append_buckets: tuple[int, ...] = (32, 64, 128, 256)
    window_buckets: tuple[int, ...] = (64, 128, 192, 256, 384, 512)
    dtype: str = "float32"
    append_rows: int = (
        0  # slots whose prompts or observations one device call appends; 0: an eighth of them
    )
    pause_share: float = (
        0.125  # appends, refills and searches wait until this share of the live slots waits
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """name: "exact_match" (Search-R1), "parallel_search" (as released) or "gated"."""

    name: str = "exact_match"
    lambda_decomposition: float = 0.15
    alpha_decomposition: float = 3.0
    lambda_search: float = 0.35
    lambda_format: float = 0.1
    gated_turns: float = 0.3  # weight of the turn rank within the group, right answers only
    gated_subqueries: float = (
        0.1  # weight of the sub-query rank within the group, right answers only
    )


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
    """GRPO: group advantages, clipped loss over policy tokens, optional KL to the starting policy."""

    advantage: str = "grpo"
    normalize_std: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0  # k3 in the loss; 0 keeps no reference parameters in memory
    entropy_coefficient: float = 0.0
    minibatches: int = 1  # optimiser steps a rollout batch
    aggregation: str = "token_mean"
    row_length: int = 512  # packed rows
    micro_rows: int = 16  # rows of one micro-batch
    logprob_chunk: int = 1024  # tokens whose logits exist at one time


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop."""

    steps: int = 30
    questions_per_step: int = 12
    group_size: int = 8
    seed: int = 0
    checkpoint_every: int = 10
    keep: int = 2
    max_bad_batches: int = 3
    kinds: tuple[str, ...] = ()  # train on these question kinds only; empty: all


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
    """The supervised stage over scripted episodes. It starts from random weights."""

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
class EvaluationConfig:
    """Evaluation: greedy over the whole split unless asked otherwise."""

    split: str = "test"
    limit: int = 0  # 0: every question
    temperature: float = 0.0
    bootstrap: int = 2000
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole recipe."""

    run_directory: str = "runs/default"
    policy: str = "embedded"  # a Hugging Face directory, or the policy that the package ships
    compile_cache: str = "runs/compiled"  # compiled programs are kept here; empty: nowhere
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
