"""Recipes of methods without a pipeline that contradict themselves."""

from typing import Any

OFFLINE = {"sft", "conditional_sft", "reward_model", "process_reward_model", "dpo", "kto", "bco"}
LOOPS = {"rejection_sampling", "rso", "iterative_dpo"}

FUNCTION = {"name": "f", "function": "f.py:f"}


def offline(method: str, **changes: Any) -> dict[str, Any]:
    return {"method": method, "output_dir": "runs/x", "model": {"path": "m"}, "data": {"path": "d.jsonl"}} | changes


def dpo(**settings: Any) -> dict[str, Any]:
    return offline("dpo", dpo=settings)


def conditional(**settings: Any) -> dict[str, Any]:
    return offline("conditional_sft", condition=settings)


def loop(method: str, **changes: Any) -> dict[str, Any]:
    return offline(method, rewards=[FUNCTION]) | changes


OFFLINE_RULES: list[tuple[dict[str, Any], str]] = [
    # every method without a pipeline
    (offline("sft", train={"offload_optimizer": True}), "train.offload_optimizer: needs train.zero_stage"),
    (offline("sft", train={"zero_stage": 2, "offload_optimizer": "nvme"}), "train.offload_optimizer: nvme needs train.zero_stage 3"),
    (
        offline("sft", train={"zero_stage": 2, "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
        "train.offload_parameters: needs train.zero_stage 3, which partitions them",
    ),
    (
        offline("sft", train={"zero_stage": 3, "offload_parameters": "cpu"}),
        "train.offload_parameters: needs train.offload_optimizer cpu or nvme",
    ),
    (offline("sft", train={"zero_stage": 3, "offload_optimizer": "nvme"}), "train.nvme_path: name the folder on a local drive"),
    (offline("sft", train={"nvme_path": "/scratch"}), "train.nvme_path: nothing is offloaded to nvme"),
    (offline("sft", train={"critic_learning_rate": 1e-5}), "train.critic_learning_rate: sft has no critic"),
    (loop("rso", train={"critic_warmup_steps": 2}), "train.critic_warmup_steps: rso has no critic"),
    (
        offline("dpo", train={"max_tokens_per_micro_batch": 2000}),
        "train.max_tokens_per_micro_batch: what is computed together may have 2048",
    ),
    (offline("sft", train={"max_tokens_per_micro_batch": 1000}), "train.max_tokens_per_micro_batch: a sample may have 1024 tokens"),
    (loop("rso", score={"zero_stage": 3, "offload_parameters": "nvme"}), "score.nvme_path: names the folder on a local drive"),
    (
        loop("rejection_sampling", rollout={"n_samples_per_prompt": 4, "routing_replay": True}),
        "rollout.routing_replay: is of online methods: rejection_sampling trains on rows",
    ),
    (offline("sft", train={"router_aux_loss": "micro_batch"}), "train.router_aux_loss: says how the loss of train.router_aux_loss_coef"),
    (offline("sft", ray={"placement": {"rollout": "spread"}}), "ray.placement.rollout: no device group rollout; there is train"),
    (loop("rso", ray={"placement": {"judge": "pack"}}), "ray.placement.judge: no device group judge; there is rollout, score, train"),
    (offline("sft", lora={"quantization": "nf4"}, train={"zero_stage": 3}), "lora.quantization: 4-bit weights are held whole"),
    (offline("sft", lora={"use_dora": True}, train={"zero_stage": 3}), "lora.use_dora: lengths of weights come from whole ones"),
    (offline("sft", lora={"sync": "merged"}), "lora.sync: no engines follow this training"),
    (loop("rso", lora={"sync": "adapter"}), "lora.sync: no engines follow this training"),
    # pairs
    (dpo(loss="simpo", length_normalize=False), "dpo.length_normalize: simpo is defined on length-averaged log-probs"),
    (dpo(loss="hinge", label_smoothing=0.1), "dpo.label_smoothing: hinge knows no wrong labels; only sigmoid, robust"),
    (dpo(loss="exo_pair", label_smoothing=0), "dpo.label_smoothing: exo_pair takes the logarithm of it, so it must be more than 0"),
    (dpo(loss="sigmoid", margin=1.0), "dpo.margin: sigmoid has none; only simpo and slic do"),
    (offline("dpo", dpo={"loss": "cpo"}, reference={"path": "r"}), "reference: cpo asks no reference"),
    (loop("rso", dpo={"loss": "simpo"}, rounds={"reference": "first"}), "rounds.reference: simpo asks no reference"),
    (conditional(kind="class", classes={"a": {"text": "as {prompt}"}}), "condition.classes.a.text: must not hold {prompt}"),
    (loop("iterative_dpo", dpo={"loss": "ipo", "label_smoothing": 0.1}), "dpo.label_smoothing: ipo knows no wrong labels"),
    (loop("rso", dpo={"loss": "hinge", "margin": 1}), "dpo.margin: hinge has none"),
    # KTO
    (offline("kto", train={"train_batch_size": 1}), "train.train_batch_size: the KL term pairs a prompt with another row's completion"),
    (offline("kto", train={"micro_batch_size": 1}), "train.train_batch_size: the KL term pairs a prompt with another row's completion"),
    # conditions
    (conditional(template="{prompt}"), "condition.template: must hold {condition} once"),
    (conditional(template="{condition} {condition} {prompt}"), "condition.template: must hold {condition} once"),
    (conditional(kind="class"), "condition.classes: name the classes, each with its text"),
    (
        conditional(kind="class", classes={"good": {"text": "Good"}}, target="bad"),
        "condition.target: no class is named bad; there are good",
    ),
    (conditional(kind="class", classes={"good": {"text": "Good"}}, std=2.0), "condition.std: is of kind score"),
    (conditional(classes={"good": {"text": "Good"}}), "condition.classes: are of kind class"),
    (conditional(target="best"), "condition.target: must be a number of standard deviations above the mean, not 'best'"),
    # rounds
    (loop("rso", rewards=[]), "rewards: rso needs at least one"),
    (
        loop("rejection_sampling", rewards=[FUNCTION | {"normalize": "batch"}]),
        "rewards.f.normalize: rejection_sampling compares the samples of one prompt; use none",
    ),
    (
        loop("iterative_dpo", rollout={"n_samples_per_prompt": 1}),
        "rollout.n_samples_per_prompt: iterative_dpo chooses among the samples of a prompt",
    ),
    (loop("iterative_dpo", rollout={"max_concurrent_requests": 7}), "rollout.max_concurrent_requests: a group of 8 samples does not fit"),
    (
        loop("iterative_dpo", rounds={"max_staleness": 1, "keep_engines": False}),
        "rounds.keep_engines: with max_staleness 1 engines sample while the policy is trained",
    ),
    (
        loop("iterative_dpo", rounds={"max_staleness": 1}, data={"path": "d.jsonl", "eval_path": "e.jsonl"}),
        "data.eval_path: with rounds.max_staleness 1 engines have no pause for it",
    ),
    (loop("rejection_sampling", rollout={"dynamic_sampling": True}), "rollout.dynamic_sampling: is of online methods"),
    (loop("rejection_sampling", select={"keep": 9}), "select.keep: more than the 8 samples of a prompt"),
    (loop("rejection_sampling", rounds={"reference": "first"}), "rounds.reference: rejection_sampling has none"),
    (loop("rso", select={"accept": 1}), "select.accept: pairs are made of the accepted: between 2 and the 8 samples"),
    (loop("rso", select={"accept": 9}), "select.accept: pairs are made of the accepted: between 2 and the 8 samples"),
    (loop("iterative_dpo", select={"max_pairs": 3}), "select.max_pairs: best_worst makes one pair of a prompt"),
    (loop("iterative_dpo", select={"pairs": "max_uncertainty"}), "select.pairs: max_uncertainty compares the rewards of an ensemble"),
    (loop("iterative_dpo", select={"etas": [1.0, 0.5]}), "select.etas: 2 values for 1 rounds"),
    (
        loop("iterative_dpo", select={"etas": [0.5, 0.5]}, rounds={"count": 2}),
        "select.etas: must fall from round to round",
    ),
    # rewards of rounds keep the rules of all rewards
    (loop("rso", rewards=[{"name": "a", "model": "m", "url": "http://x"}]), "rewards.a: give exactly one of model, function and url"),
    (loop("rso", rewards=[FUNCTION | {"steps": {"separator": "x"}}]), "rewards.f.steps"),
]
"""(recipe, how its one line begins)"""
