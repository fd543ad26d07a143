"""The sections of a recipe. Every key has its type, default, range and one line of help.

Only shapes and ranges are checked here; what needs two sections at once is in `recipe.py`,
what needs files or machines is in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


# Whole numbers and switches are what they say. Numbers may come as text: YAML reads 1e-6 as one.
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Number = Annotated[float, BeforeValidator(_no_bool)]
PositiveInt = Annotated[Whole, Field(gt=0)]
PositiveFloat = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]
DType = Literal["float32", "bfloat16"]
Strategy = Literal["pack", "spread", "strict_pack", "strict_spread"]
"""How the workers of a device group are put on nodes."""


def _offload(value: Any) -> Any:
    return {True: "cpu", False: "none"}[value] if isinstance(value, bool) else value


Offload = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(_offload)]
"""Where what a device does not need just now is kept; true means cpu, false none."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class Model(Section):
    path: str = Field(description="Hugging Face model folder or hub id")
    tokenizer: str | None = Field(None, description="tokenizer folder or hub id; default: the model's own")
    dtype: DType = Field("float32", description="type of the trained weights in forward and backward")
    chat_template: str | None = Field(None, description="path of a Jinja chat template; default: the tokenizer's own")
    gradient_checkpointing: Flag = Field(False, description="recompute activations in the backward pass")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="attention implementation")
    fp32_head: Flag = Field(
        False, description="logits of bfloat16 models as float32 products, in trainer, reference, snapshots and engine: closer log-probs"
    )
    rope_scaling: dict[str, Any] | None = Field(
        None,
        description="rotary positions beyond those of the model's training, as transformers names them: {rope_type: yarn, factor: 4.0, …}; "
        "laid over the model's own in trainer, reference, critic and engine",
    )
    liger: Flag | None = Field(
        None, description="Liger's fused RMSNorm, RoPE and SwiGLU; default: on a GPU, where liger-kernel is installed and knows the model"
    )
    remove_padding: Flag = Field(
        True,
        description="samples that are computed together stand in one row, each attending to itself only (attention sdpa or "
        "flash_attention_2, models whose tokens meet in attention only); off: each in a row of its own, padded to the longest",
    )


class Data(Section):
    path: str = Field(description="JSONL, JSON, Parquet or CSV file, or a hub id")
    split: str = Field("train", description="split of a hub dataset")
    eval_path: str | None = Field(None, description="held-out file in the same form")
    prompt_column: str = Field("prompt", description="column that holds the prompt (text or messages)")
    max_prompt_length: PositiveInt = Field(512, description="longest prompt in tokens (methods that sample)")
    max_length: PositiveInt = Field(1024, description="longest sample, or packed row, in tokens (methods that train on rows)")
    on_long: Literal["drop", "error"] = Field("drop", description="a prompt or sample over its limit: drop and count, or stop")
    on_bad_row: Literal["error", "drop"] = Field("error", description="a malformed row: stop, or drop and count")
    shuffle: Flag = Field(True, description="shuffle anew each epoch, from the recipe's seed")
    drop_last: Flag = Field(False, description="drop the remainder of an epoch; default: train it as a short last step")
    apply_chat_template: Flag = Field(True, description="put text prompts through the chat template as one user message")
    packing: Flag = Field(True, description="SFT: pack whole samples into rows of max_length, each attending to itself only")
    train_on: Literal["completion", "assistant", "all"] = Field(
        "completion", description="SFT: tokens that enter the loss; assistant: also the assistant's messages within a prompt"
    )
    label_column: str = Field("label", description="KTO, BCO: column with true or false")
    margin_column: str = Field("margin", description="reward model: column with the pair's margin, where there is one")
    reward_column: str = Field("reward", description="conditional SFT: column with the row's reward")
    class_column: str = Field("class", description="conditional SFT: column with the class of the row's source")
    step_separator: str = Field("\n", min_length=1, description="process reward model: text that ends a step")


class MultiTurn(Section):
    function: str = Field(description="path.py:function or package.module:function: async def rollout(prompt, generate, **columns)")
    max_turns: PositiveInt = Field(8, description="calls of generate in one sample; one more ends the sample as cut")
    timeout: PositiveFloat = Field(300.0, description="seconds for one sample, after which it ends with what it has, as cut")
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="a function that raises: end the run naming the row, or leave the sample out"
    )


class Rollout(Section):
    n_samples_per_prompt: PositiveInt = Field(1, description="samples of one prompt: the size of a group")
    max_response_length: PositiveInt = Field(256, description="longest response in tokens")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature; log-probs use it too")
    top_p: Number = Field(
        1.0, gt=0, le=1, description="nucleus; training needs 1.0: the trainer computes log-probs of the whole distribution"
    )
    top_k: Whole = Field(-1, ge=-1, description="-1: off; training needs -1: the trainer computes log-probs of the whole distribution")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="strings that end a response beside EOS")
    multi_turn: MultiTurn | None = Field(None, description="a function that plays a sample's turns: tools, games, environments")
    dynamic_sampling: Flag = Field(
        False,
        description="leave out groups whose rewards (functions and urls) are all equal, and sample the next prompts in their place (DAPO)",
    )
    dynamic_sampling_limit: Number = Field(
        3.0, ge=1, description="a step samples at most so many times rollout_batch_size prompts; then groups with equal rewards stay in"
    )
    engine: Literal["vllm", "transformers"] = Field(
        "vllm", description="transformers: for machines without vLLM and models that it cannot serve, on one device (docs/engines.md)"
    )
    max_concurrent_requests: PositiveInt = Field(64, description="samples in one engine at a time")
    tensor_parallel_size: PositiveInt = Field(1, description="devices of one engine (vllm)")
    gpu_memory_utilization: Number = Field(
        0.85, gt=0, le=1, description="share of the GPU (of a group's fraction of it) for one engine (vllm)"
    )
    cpu_kv_cache_gib: PositiveInt = Field(1, description="size of the KV cache of an engine on CPU, GiB (vllm)")
    dtype: DType | None = Field(None, description="the engine's weights; default: model.dtype")
    enforce_eager: Flag | None = Field(None, description="no graph capture; default: on CPU only (transformers: never any)")
    enable_prefix_caching: Flag = Field(True, description="share the prompt's KV cache within a group")
    routing_replay: Flag = Field(
        False,
        description="mixtures of experts: the engine tells which experts each token went to, and training sends it to the same "
        "(engines on GPU)",
    )
    engine_args: dict[str, Any] = Field(
        {}, description="further engine arguments: vLLM's, passed through; of transformers only attn_implementation, sdpa or eager"
    )
    sleep: Literal[0, 1, 2] | None = Field(
        None,
        description="what a sleeping engine gives back on a GPU (vllm): 0 nothing, 1 the KV cache and, to host memory, the weights, 2 both "
        "for good; on CPU 1 and 2 give back the KV cache; default: 1 where pipeline.sleep has it sleep",
    )


AdvantageEstimator = Literal[
    "gae", "group_norm", "dr_grpo", "rloo", "opo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "best_worst"
]
PolicyLoss = Literal["ppo_clip", "gspo", "cispo", "policy_gradient", "dpo"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
ImportanceCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Algorithm(Section):
    advantage_estimator: AdvantageEstimator = Field("gae", description="how advantages are made; docs/methods.md has the formulas")
    gamma: Number = Field(1.0, ge=0, le=1, description="discount, of the estimators that go by token: gae, reinforce…, remax")
    lam: Number = Field(0.95, ge=0, le=1, description="λ, GAE")
    normalize: Literal["none", "group", "update", "streaming_exact"] = Field(
        "none",
        description="whiten advantages over the group or the update: `update` waits for all of it; `streaming_exact` gives the same "
        "gradient without waiting, for a second backward pass and one more full gradient in float32 (a third and two with kl_in: loss "
        "or entropy_coef)",
    )
    policy_loss: PolicyLoss = Field("ppo_clip", description="what advantages are multiplied with; docs/methods.md has the formulas")
    clip_ratio: Number = Field(0.2, gt=0, description="clip ε of the ratio; the lower one when clip_ratio_high is given")
    clip_ratio_high: Number | None = Field(None, gt=0, description="upper ε when it differs (clip-higher)")
    dual_clip: Number | None = Field(None, gt=1, description="ppo_clip: bound c on the loss of negative advantages, c·|A|; null: off")
    value_clip: Number | None = Field(0.2, gt=0, description="clip of the value change; null: off")
    value_coef: Number = Field(0.5, ge=0, description="weight of the value loss (it has ½ of the squared error inside)")
    kl_coef: Number = Field(0.05, ge=0, description="β of the KL to the reference; 0: no reference is loaded")
    kl_in: Literal["reward", "loss"] = Field("reward", description="KL as a penalty in the token reward, or as a loss term")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="Schulman's estimators; in the reward only k1 has the KL's gradient in expectation, in the loss only k2"
    )
    kl_target: PositiveFloat | None = Field(None, description="adaptive controller: kl_coef moves until the metric kl (per token) is this")
    kl_horizon: PositiveFloat = Field(10_000.0, description="adaptive controller: samples over which kl_coef moves by its factor")
    reference_refresh: PositiveInt | None = Field(
        None, description="steps after which the reference becomes the policy anew; default: never"
    )
    loss_aggregation: Aggregation = Field(
        "token_mean", description="denominator of the policy loss; constant: samples × max_response_length (Dr. GRPO)"
    )
    entropy_coef: Number = Field(0.0, ge=0, description="entropy bonus")
    update_epochs: PositiveInt = Field(1, description="passes over a step's samples")
    mask_truncated: Flag = Field(False, description="leave samples cut at max_response_length out of the loss")
    missing_eos_penalty: Number = Field(0.0, ge=0, description="taken from the reward of a truncated sample")
    overlong_buffer: PositiveInt | None = Field(
        None, description="soft penalty (DAPO): grows linearly over the last so many tokens before max_response_length"
    )
    overlong_penalty: Number = Field(1.0, ge=0, description="the soft penalty of a response of max_response_length")
    importance_correction: ImportanceCorrection = Field(
        "token_truncate",
        description="for the policy that sampled not being the one the ratio is against (staleness, the engine's rounding): "
        "weights exp(old − rollout log-prob) by token or of the whole sequence, cut at importance_cap or, beyond it, 0",
    )
    importance_cap: Number | None = Field(None, gt=0, description="C of importance_correction; default: off at staleness 0, 2.0 above")
    dpo_beta: PositiveFloat = Field(0.1, description="β of policy_loss dpo")
    dpo_loss: Literal["sigmoid", "ipo"] = Field("sigmoid", description="loss of a pair, policy_loss dpo")


class Ptx(Section):
    path: str = Field(description="demonstrations or texts, as sft takes them, mixed into every update (PPO-ptx)")
    split: str = Field("train", description="split of a hub dataset")
    coef: PositiveFloat = Field(1.0, description="weight of the mixed-in loss, a mean over its tokens")
    batch_size: PositiveInt = Field(8, description="rows in an update; a set that is used up starts again")


class Train(Section):
    rollout_batch_size: PositiveInt = Field(32, description="prompts in a step (online methods)")
    train_batch_size: PositiveInt | None = Field(None, description="samples in an update; default: a step's, or micro_batch_size (offline)")
    micro_batch_size: PositiveInt = Field(8, description="samples in one forward/backward over all ranks (offline methods)")
    steps: PositiveInt | None = Field(None, description="stop after this many steps; default: as many as epochs give")
    epochs: PositiveInt = Field(1, description="passes over the dataset")
    learning_rate: PositiveFloat = Field(1e-6, description="peak learning rate of the model")
    critic_learning_rate: PositiveFloat | None = Field(None, description="default: learning_rate")
    critic_warmup_steps: Whole = Field(0, ge=0, description="first steps in which the critic is trained and the actor is not")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    warmup_ratio: Number = Field(0.0, ge=0, le=1, description="share of the updates with a rising learning rate")
    weight_decay: Number = Field(0.0, ge=0, description="AdamW weight decay")
    adam_betas: tuple[Share, Share] = Field((0.9, 0.95), description="AdamW β1, β2")
    max_grad_norm: PositiveFloat = Field(1.0, description="clip of the global gradient norm")
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="DeepSpeed ZeRO stage")
    offload_optimizer: Offload = Field(
        "none", description="where optimizer state is kept: cpu is host memory (ZeRO ≥ 1; true means it), nvme files in nvme_path (ZeRO 3)"
    )
    offload_parameters: Offload = Field("none", description="where weights are kept until a layer needs them, likewise (ZeRO 3)")
    nvme_path: str | None = Field(None, description="folder on a local drive for what is offloaded to nvme")
    max_tokens_per_micro_batch: PositiveInt | None = Field(
        None,
        description="most tokens of one forward/backward on one device, shared out evenly over the ranks; larger micro-batches are cut",
    )
    sequence_parallel_size: PositiveInt = Field(1, description="neighbouring ranks that share each row of tokens (Ulysses)")
    router_aux_loss_coef: PositiveFloat | None = Field(
        None,
        description="mixtures of experts: weight of the loss that keeps experts equally busy; null: off, whatever the model's config says",
    )
    router_aux_loss: Literal["sequence", "micro_batch"] = Field(
        "sequence",
        description="what that loss counts over: each sample by itself (DeepSeek-V3), or a device's micro-batch (Switch), where the result "
        "depends on how samples are cut into micro-batches",
    )

    @property
    def row_tokens(self) -> int | None:
        """Most tokens of a row, which `sequence_parallel_size` ranks share."""
        return None if self.max_tokens_per_micro_batch is None else self.max_tokens_per_micro_batch * self.sequence_parallel_size

    def stage(self, dtype: DType) -> int:
        """The ZeRO stage that is run: in bfloat16 without ZeRO DeepSpeed would sum gradients in bfloat16, so 0 is run as 1."""
        return max(self.zero_stage, 1) if dtype == "bfloat16" else self.zero_stage


class Score(Section):
    zero_stage: Literal[0, 3] = Field(
        0, description="3: the devices of a score group hold one copy of each model together, in parts; 0: each device a copy"
    )
    offload_parameters: Offload = Field("none", description="where parts are kept until a layer needs them (zero_stage 3)")
    nvme_path: str | None = Field(None, description="folder on a local drive for what is offloaded to nvme")


class Pipeline(Section):
    overlap: Flag = Field(True, description="off: strictly one stage at a time")
    max_staleness: Whole = Field(0, ge=0, description="0: on-policy; k: sampling may run k steps ahead")
    micro_batch_size: PositiveInt = Field(8, description="samples in the unit that moves between stages, over all train ranks")
    order: Literal["prompt", "completion"] = Field("prompt", description="order in which micro-batches of an update are trained")
    in_flight_update: Flag = Field(True, description="staleness ≥ 1: engines keep their requests through an install; off: they drain first")
    weight_transfer: Literal["nccl", "gloo", "object_store"] | None = Field(
        None,
        description="how engines get weights: from the trainer's ranks over nccl (GPUs) or gloo, or through the object store in host "
        "memory; default: nccl where actor and engines have GPUs of their own",
    )
    verify_sync: Flag = Field(False, description="compare a checksum per tensor on both sides of every sync")
    sleep: Flag | None = Field(
        None,
        description="stages that share a device group leave its memory to the one whose turn it is: engines sleep, models and "
        "optimizers wait in host memory; default: on GPUs",
    )


class Steps(Section):
    separator: str = Field("\n", min_length=1, description="text that ends a step, as in the model's training")
    aggregate: Literal["min", "mean", "product", "last"] = Field("min", description="from the steps' probabilities to the sample's reward")


class Reward(Section):
    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", description="metric reward/NAME; of a model also the role's name")
    model: str | None = Field(None, description="folder or hub id of a sequence classifier with one label")
    function: str | None = Field(
        None, description="path.py:function or package.module:function; docs/rewards.md lists those that come along"
    )
    url: str | None = Field(None, description="address of a reward server, such as conveyor serve-reward; http:// or https://")
    steps: Steps | None = Field(None, description="the model is a process reward model, which scores every step")
    arguments: dict[str, Any] = Field({}, description="further keyword arguments of every call of the function")
    weight: Number = Field(1.0, description="weight in the total")
    normalize: Literal["none", "running", "batch"] = Field(
        "none", description="(r − mean) / std: of all earlier steps' samples, or of the update's (which waits for all of them)"
    )
    clip: PositiveFloat | None = Field(None, description="bound of the reward's size, after normalising; null: off")
    timeout: PositiveFloat = Field(
        60.0, description="seconds for one call, after which a function's samples count as None and a url is asked again"
    )
    on_error: Literal["stop", "skip"] = Field("stop", description="a function that raises: end the run naming the row, or score None")
    workers: PositiveInt = Field(1, description="processes of a function, or requests to a url, that work at a time")
    batch_size: PositiveInt = Field(64, description="most samples in one call: those that wait when a worker is free")
    token_variable: str | None = Field(None, description="environment variable with the url's bearer token")
    outage: PositiveFloat = Field(3600.0, description="seconds a url may fail to answer; the run waits, then ends")

    @property
    def judged(self) -> bool:
        """Scored sample by sample beside the devices: a function or a url, not a model of the score stage."""
        return self.model is None


class Evaluate(Section):
    path: str = Field(description="held-out prompts, in the form of data.path")
    every: PositiveInt = Field(1, description="steps from one evaluation to the next; the first is before training, the last at its end")
    n_samples_per_prompt: PositiveInt = Field(1, description="samples of one prompt")
    temperature: PositiveFloat | None = Field(None, description="default: rollout.temperature")
    greedy: Flag = Field(False, description="beside the samples, one answer of likeliest tokens a prompt: eval/greedy/…")
    pass_at: tuple[PositiveInt, ...] = Field((1,), description="k of eval/pass@k: the chance that one of k samples is right")
    success_reward: str | None = Field(None, description="reward that says what is right; default: the weighted sum of all")
    success_threshold: Number = Field(1.0, description="a sample whose success_reward is at least this is right")
    max_prompts: PositiveInt | None = Field(None, description="use the first so many; default: all")
    in_bubbles: Flag | None = Field(
        None,
        description="on: only engines with nothing else to do evaluate, and new weights end what is unfinished (eval/coverage tells); "
        "off: evaluation comes first, and only versions that engines skip (max_staleness ≥ 1) are incomplete; "
        "default: on where rollout has devices of its own",
    )


class Checkpoint(Section):
    every: PositiveInt | None = Field(None, description="steps between checkpoints; default: none but the final model")
    keep: PositiveInt = Field(2, description="checkpoints kept")
    resume: Flag = Field(False, description="go on from the newest checkpoint in output_dir")


class Ray(Section):
    address: str | None = Field(None, description="cluster to join; default: RAY_ADDRESS, else a local one")
    object_store_gib: PositiveFloat | None = Field(
        None, description="object store of a local Ray; default: room for two versions of the weights on CPU, Ray's own on GPU"
    )
    placement_timeout: PositiveFloat = Field(10.0, description="seconds to wait for the devices asked for")
    timeout: PositiveFloat = Field(
        1800.0,
        description="seconds that ranks wait for one another in a collective, and a worker has for one task (a micro-batch, an update, a "
        "sync, a checkpoint; not sampling), before the run ends with its name",
    )
    placement: dict[str, Strategy] = Field(
        {},
        description="device group → how its workers are put on nodes: pack (default; as few nodes as can be), spread (evenly), "
        "strict_pack (one node, or an error), strict_spread (a node each, or an error); an engine's own devices are always of one node",
    )
