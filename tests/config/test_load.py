"""A recipe is right, or the user gets one line that names the key."""

import ast
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from conveyor.config import (
    LoopRecipe,
    OfflineRecipe,
    OnlineRecipe,
    UserError,
    engine_rules,
    load_recipe,
    lora_rules,
    offline_rules,
    parse_recipe,
    reward_rules,
    rules,
)
from conveyor.config.describe import keys
from conveyor.config.presets import DEFAULTS, LOOP_DEFAULTS, METHOD_DEFAULTS
from conveyor.config.recipe import METHODS
from tests.config.offline_cases import LOOPS, OFFLINE, OFFLINE_RULES, loop

GRPO = {
    "method": "grpo",
    "output_dir": "runs/x",
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "rewards": [{"name": "rm", "model": "r"}],
}


def write(folder: Path, recipe: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe))
    return path


def test_a_method_sets_its_defaults_and_the_recipe_overrides_them(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GRPO), {"rollout.n_samples_per_prompt": "4", "train.learning_rate": "2e-5"})
    assert isinstance(recipe, OnlineRecipe)
    assert recipe.algorithm.advantage_estimator == "group_norm" and recipe.algorithm.kl_in == "loss"
    assert recipe.rollout.n_samples_per_prompt == 4 and recipe.train.learning_rate == 2e-5
    assert recipe.placed_roles == ("rollout", "reference", "rm", "actor")


def test_the_reference_is_not_placed_without_kl() -> None:
    recipe = parse_recipe(GRPO | {"algorithm": {"kl_coef": 0}})
    assert isinstance(recipe, OnlineRecipe) and "reference" not in recipe.placed_roles


BAD: list[tuple[dict[str, Any], str]] = [
    ({"trian": {}}, "trian: unknown key; do you mean train?"),
    ({"train": {"stpes": 1}}, "train.stpes: unknown key; do you mean train.steps?"),
    ({"train": {"overlap": False}}, "train.overlap: unknown key; do you mean pipeline.overlap?"),
    ({"zzzzzzzz": 1}, "zzzzzzzz: unknown key"),
    ({"train": {"steps": "many"}}, "train.steps: Input should be a valid integer"),
    ({"train": {"steps": 0}}, "train.steps: Input should be greater than 0"),
    ({"method": "pop"}, "method: 'pop'; one of"),
    ({"rewards": []}, "rewards: "),
    ({"rewards": [{"name": "a"}]}, "rewards.a: give exactly one of model, function and url"),
    ({"rewards": [{"name": "a", "model": "x"}, {"name": "a", "model": "y"}]}, "rewards: two rewards are named a"),
    ({"rollout": {"n_samples_per_prompt": 1}}, "rollout.n_samples_per_prompt: group_norm compares"),
    ({"rollout": {"top_p": 0.9}}, "rollout.top_p: samples would come from a truncated distribution"),
    ({"train": {"router_aux_loss": "micro_batch"}}, "train.router_aux_loss: says how the loss of train.router_aux_loss_coef counts"),
    (
        {"rollout": {"routing_replay": True, "multi_turn": {"function": "play.py:play"}}},
        "rollout.routing_replay: each turn of a sample is routed by itself",
    ),
    ({"rollout": {"routing_replay": True}, "pipeline": {"max_staleness": 1}}, "rollout.routing_replay: a sample must see one version"),
    ({"rollout": {"top_k": 20}}, "rollout.top_k: samples would come from a truncated distribution"),
    ({"train": {"train_batch_size": 12}}, "train.train_batch_size: must be a multiple of rollout.n_samples_per_prompt (8)"),
    ({"train": {"train_batch_size": 512}}, "train.train_batch_size: 512 samples are more than a step has (256)"),
    ({"pipeline": {"micro_batch_size": 300}}, "pipeline.micro_batch_size: larger than an update"),
    (
        {"devices": {"rollout": 1, "train": 1}},
        "devices: role reference is on score, which devices has not (rollout, train); place it: roles: {score: train}",
    ),
    ({"devices": {"rollout": 1, "train": 1}, "roles": {"score": "trian"}}, "roles.score: no device group trian"),
    ({"roles": {"judge": "score"}}, "roles.judge: no such role"),
    ({"rewards": [{"name": "actor", "model": "x"}]}, "rewards: actor is the name of a role"),
    ({"train": {"offload_optimizer": True}}, "train.offload_optimizer: needs train.zero_stage"),
    ({"train": {"offload_optimizer": "disk"}}, "train.offload_optimizer: Input should be 'none', 'cpu' or 'nvme'"),
    ({"train": {"zero_stage": 3, "offload_optimizer": "nvme"}}, "train.nvme_path: name the folder on a local drive"),
    ({"train": {"steps": True}}, "train.steps: Input should be a valid integer"),
    ({"train": {"steps": "3"}}, "train.steps: Input should be a valid integer"),
    ({"train": {"learning_rate": True}}, "train.learning_rate: Input should be a number"),
    ({"train": {"adam_betas": [1.5, 0.9]}}, "train.adam_betas.0: Input should be less than 1"),
    ({"pipeline": {"overlap": "yes"}}, "pipeline.overlap: Input should be a valid boolean"),
    ({"rollout": {"stop": [""]}}, "rollout.stop.0: "),
    (
        {"data": {"path": "d", "eval_path": "e"}},
        "data.eval_path: grpo evaluates by sampling: name the held-out prompts",
    ),
    ({"devices": {"rollout": 1, "score": 1, "train": 1, "spare": 1}}, "devices.spare: no role is placed on this group"),
    ({"rewards": [{"name": "timeouts", "model": "x"}]}, "rewards: timeouts is the name of"),
    ({"train": {"learning_rate": float("nan")}}, "train.learning_rate: "),
    ({"model": None}, "model: "),
]


@pytest.mark.parametrize(("changes", "line"), BAD)
def test_bad_settings_are_one_line_that_names_the_key(tmp_path: Path, changes: dict, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path, GRPO | changes))
    text = str(caught.value)
    assert f"recipe.yaml: {line}" in text and "\n" not in text


def base(method: str, *rewards: dict, **changes: Any) -> dict[str, Any]:
    given = {"rewards": list(rewards)} if rewards else {}
    return GRPO | {"method": method} | given | changes


FUNCTION = {"name": "f", "function": "f.py:f"}
TWO = {"rollout": {"n_samples_per_prompt": 2}}
DPO = {"pipeline": {"micro_batch_size": 2}}
RULES: list[tuple[dict[str, Any], str]] = [
    # method
    (base("distillation"), "reference: distillation learns from the teacher that is named here"),
    (
        base("distillation", reference={"path": "t"}, algorithm={"kl_coef": 0}),
        "algorithm.kl_coef: 0 would leave nothing to learn from the teacher",
    ),
    (base("reinforce", rewards=[]), "rewards: reinforce needs at least one"),
    (
        base("grpo", algorithm={"policy_loss": "dpo", "kl_coef": 0}),
        "algorithm.advantage_estimator: dpo and advantage_estimator best_worst go together",
    ),
    (
        base("online_dpo", algorithm={"policy_loss": "ppo_clip"}),
        "algorithm.policy_loss: dpo and advantage_estimator best_worst go together",
    ),
    (base("grpo", train={"critic_warmup_steps": 1}), "train.critic_warmup_steps: group_norm has no critic"),
    (base("grpo", critic={"path": "c"}), "critic: group_norm has no critic"),
    (base("grpo", train={"micro_batch_size": 4}), "train.micro_batch_size: is of offline methods; of grpo it is pipeline.micro_batch_size"),
    (
        base("dapo", FUNCTION, rollout={"n_samples_per_prompt": 1}, train={"train_batch_size": 64}),
        "rollout.n_samples_per_prompt: group_norm compares",
    ),
    (
        base("ppo", train={"critic_warmup_steps": 3, "steps": 3}),
        "train.critic_warmup_steps: the actor would not be trained in any of the 3 steps",
    ),
    (
        base("distillation", reference={"path": "t"}, algorithm={"kl_estimator": "k3"}),
        "algorithm.kl_estimator: in the reward only k1 leads to the teacher",
    ),
    (base("ppo", algorithm={"kl_in": "loss"}), "algorithm.kl_estimator: k1 in the loss has no gradient in expectation"),
    (
        base("reinforce", algorithm={"update_epochs": 2}),
        "algorithm.policy_loss: policy_gradient has no ratio, so it is for one update a step",
    ),
    (
        base("grpo", algorithm={"importance_correction": "token_mask"}),
        "algorithm.importance_correction: has no effect without algorithm.importance_cap",
    ),
    # the trainer
    (base("grpo", train={"max_tokens_per_micro_batch": 700}), "train.max_tokens_per_micro_batch: a sample may have 768 tokens"),
    (
        base("online_dpo", train={"max_tokens_per_micro_batch": 768}, **DPO),
        "train.max_tokens_per_micro_batch: what is computed together may have 1536 tokens",
    ),
    (
        base("grpo", model={"path": "m", "remove_padding": False}, train={"sequence_parallel_size": 2}),
        "train.sequence_parallel_size: rows that are cut over ranks need model.attention sdpa and model.remove_padding",
    ),
    (base("grpo", score={"offload_parameters": "cpu"}), "score.offload_parameters: needs score.zero_stage 3"),
    (base("grpo", score={"zero_stage": 3, "nvme_path": "/disk"}), "score.nvme_path: names the folder on a local drive"),
    # rollout and sizes
    (base("grpo", rollout={"max_concurrent_requests": 7}), "rollout.max_concurrent_requests: a group of 8 samples does not fit"),
    (
        base("remax", rollout={"n_samples_per_prompt": 4, "max_concurrent_requests": 4}),
        "rollout.max_concurrent_requests: a group of 5 samples does not fit",
    ),
    (base("grpo", train={"train_batch_size": 48}), "train.train_batch_size: must divide the 256 samples of a step"),
    (
        base("online_dpo", pipeline={"micro_batch_size": 3}),
        "pipeline.micro_batch_size: must be a multiple of rollout.n_samples_per_prompt (2)",
    ),
    # another engine
    (
        base("grpo", rollout={"engine": "transformers", "tensor_parallel_size": 2}),
        "rollout.tensor_parallel_size: an engine of transformers is on one device",
    ),
    (
        base("grpo", rollout={"engine": "transformers", "enforce_eager": False}),
        "rollout.enforce_eager: transformers captures no graphs",
    ),
    (
        base("grpo", rollout={"engine": "transformers", "gpu_memory_utilization": 0.5}),
        "rollout.gpu_memory_utilization: is vLLM's; the cache of transformers grows",
    ),
    (
        base("grpo", rollout={"engine": "transformers", "routing_replay": True}),
        "rollout.routing_replay: an engine of transformers does not tell which experts",
    ),
    (base("grpo", rollout={"engine": "transformers", "cpu_kv_cache_gib": 2}), "rollout.cpu_kv_cache_gib: is vLLM's"),
    (
        base("grpo", rollout={"engine": "transformers", "engine_args": {"max_num_seqs": 2}}),
        "rollout.engine_args.max_num_seqs: engine: transformers takes no such argument, only attn_implementation",
    ),
    (
        base("grpo", rollout={"engine": "transformers", "engine_args": {"attn_implementation": "flash_attention_2"}}),
        "rollout.engine_args.attn_implementation: engine: transformers takes sdpa or eager, not 'flash_attention_2'",
    ),
    # estimators
    *[
        (base(method, FUNCTION, rollout={"n_samples_per_prompt": 1}), f"rollout.n_samples_per_prompt: {estimator} compares the samples")
        for method, estimator in (
            ("dr_grpo", "dr_grpo"),
            ("rloo", "rloo"),
            ("opo", "opo"),
            ("reinforce_pp_baseline", "reinforce_pp_baseline"),
            ("dapo", "group_norm"),
            ("online_dpo", "best_worst"),
        )
    ],
    (base("ppo", algorithm={"normalize": "group"}), "algorithm.normalize: group is for estimators with one advantage a sample, not gae"),
    (base("reinforce_pp", algorithm={"normalize": "group"}), "algorithm.normalize: group is for estimators with one advantage a sample"),
    (base("grpo", algorithm={"normalize": "group"}), "algorithm.normalize: group_norm is normalised by group already"),
    (
        base("online_dpo", algorithm={"normalize": "group"}, **DPO),
        "algorithm.normalize: group is for estimators with one advantage a sample",
    ),
    (base("online_dpo", algorithm={"normalize": "update"}, **DPO), "algorithm.normalize: the dpo loss has no advantages to whiten"),
    (
        base("reinforce_pp", {"name": "a", "model": "m", "normalize": "batch"}),
        "rewards.a.normalize: batch statistics and whitened advantages by token (reinforce_pp) would wait for each other",
    ),
    # losses
    (base("gspo", algorithm={"dual_clip": 3.0}), "algorithm.dual_clip: belongs to policy_loss ppo_clip, not gspo"),
    (base("ppo", algorithm={"dual_clip": 1.2}), "algorithm.dual_clip: must be more than 1 + the upper clip ratio"),
    (base("ppo", algorithm={"dual_clip": 1.3, "clip_ratio_high": 0.4}), "algorithm.dual_clip: must be more than 1 + the upper clip ratio"),
    (base("ppo", algorithm={"overlong_buffer": 257}), "algorithm.overlong_buffer: more than rollout.max_response_length (256)"),
    (base("online_dpo", algorithm={"entropy_coef": 0.1}, **DPO), "algorithm.entropy_coef: the dpo loss has no entropy bonus"),
    (base("online_dpo", algorithm={"importance_cap": 2.0}, **DPO), "algorithm.importance_cap: the dpo loss asks which of two answers"),
    (
        base("online_dpo", pipeline={"micro_batch_size": 2, "max_staleness": 1}),
        "pipeline.max_staleness: the dpo loss asks which of two answers",
    ),
    # KL
    (base("grpo", algorithm={"kl_target": 0.1, "kl_coef": 0}), "algorithm.kl_target: the controller moves kl_coef by a factor"),
    (
        base("distillation", reference={"path": "t"}, algorithm={"kl_target": 0.1}),
        "algorithm.kl_target: distillation makes the KL to the teacher as small as it can",
    ),
    (base("dr_grpo", algorithm={"reference_refresh": 2}), "algorithm.reference_refresh: there is no reference at kl_coef 0"),
    (
        base("distillation", reference={"path": "t"}, algorithm={"reference_refresh": 2}),
        "algorithm.reference_refresh: would replace the teacher",
    ),
    (base("online_dpo", algorithm={"kl_coef": 0.1}, **DPO), "algorithm.kl_coef: the dpo loss holds the policy near the reference itself"),
    # whitening while it streams
    (
        base("grpo", algorithm={"normalize": "streaming_exact"}, train={"train_batch_size": 64}),
        "algorithm.normalize: streaming_exact is exact at ratio 1, so with one update a step only",
    ),
    (
        base("grpo", algorithm={"normalize": "streaming_exact", "update_epochs": 2}),
        "algorithm.normalize: streaming_exact is exact at ratio 1",
    ),
    (
        base("grpo", algorithm={"normalize": "streaming_exact"}, train={"zero_stage": 3}),
        "algorithm.normalize: streaming_exact keeps a full gradient on every rank",
    ),
    (
        base("grpo", {"name": "a", "model": "m", "normalize": "batch"}, algorithm={"normalize": "streaming_exact"}),
        "algorithm.normalize: rewards normalised by batch wait for the whole update anyway",
    ),
    # dynamic sampling
    (base("ppo", FUNCTION, rollout={"dynamic_sampling": True}), "rollout.dynamic_sampling: equal rewards in a group tell gae something"),
    (
        base("remax", FUNCTION, rollout={"dynamic_sampling": True}),
        "rollout.dynamic_sampling: equal rewards in a group tell remax something",
    ),
    (base("dapo"), "rollout.dynamic_sampling: goes by rewards that are functions or urls"),
    # rewards
    (base("grpo", {"name": "a", "model": "m", "url": "http://x"}), "rewards.a: give exactly one of model, function and url"),
    (base("grpo", {"name": "a", "url": "x:80"}), "rewards.a.url: 'x:80' does not begin with http:// or https://"),
    (base("grpo", {"name": "a", "model": "m", "arguments": {"k": 1}}), "rewards.a.arguments: a reward model takes none"),
    (base("grpo", {"name": "a", "function": "f.py:f", "token_variable": "T"}), "rewards.a.token_variable: belongs to a url"),
    (base("grpo", {"name": "mean", "model": "m"}), "rewards: mean is the name of a role or metric"),
    # several turns
    (
        base("remax", rollout={"multi_turn": {"function": "t.py:t"}}),
        "rollout.multi_turn: the greedy baseline of remax is one answer to a prompt, not a conversation",
    ),
    # nodes
    (
        base("grpo", FUNCTION, devices={"rollout": 1, "train": 1, "score": 1}, ray={"placement": {"trian": "pack"}}),
        "ray.placement.trian: no device group trian; there is rollout, score, train",
    ),
    (base("grpo", FUNCTION, ray={"placement": {"judge": "spread"}}), "ray.placement.judge: no device group judge; there is rollout,"),
    (base("grpo", FUNCTION, pipeline={"sleep": True}), "pipeline.sleep: no two stages share a device group"),
    # placement
    (base("grpo", FUNCTION, roles={"f": "score"}), "roles.f: a function or url needs no device"),
    (
        base("dr_grpo", FUNCTION, devices={"rollout": 1, "train": 1, "rewards": 1}, roles={"policy_snapshot": "rewards"}),
        "devices.rewards: ",
    ),
    # evaluation
    (
        base("distillation", reference={"path": "t"}, rewards=[], evaluate={"path": "e"}),
        "evaluate: held-out answers are judged by rewards, and the recipe has none",
    ),
    (
        base("grpo", pipeline={"weight_transfer": "nccl"}, roles={"rollout": "train"}),
        "pipeline.weight_transfer: engines on the actor's GPUs: one GPU cannot be two members of an NCCL group; use object_store",
    ),
    (
        base("grpo", pipeline={"weight_transfer": "nccl"}, roles={"score": "train"}, algorithm={"kl_coef": 0.1}),
        "pipeline.weight_transfer: the actor sleeps between its turns on train, and engines may ask then; use object_store",
    ),
    (
        base("grpo", pipeline={"weight_transfer": "gloo"}, rollout={"engine": "transformers"}),
        "pipeline.weight_transfer: gloo sends to vLLM's processes; of another engine use object_store",
    ),
    (
        base("grpo", evaluate={"path": "e", "in_bubbles": True}, roles={"rollout": "train"}),
        "evaluate.in_bubbles: rollout shares its devices with actor, so there are no bubbles",
    ),
    (
        base("grpo", evaluate={"path": "e", "n_samples_per_prompt": 64, "greedy": True}),
        "evaluate.n_samples_per_prompt: more than rollout.max_concurrent_requests (64)",
    ),
    (base("grpo", lora={"use_dora": True, "sync": "adapter"}), "lora.sync: vLLM serves no DoRA adapters; use merged"),
    (base("ppo", lora={"quantization": "nf4"}, score={"zero_stage": 3}), "lora.quantization: score workers hold 4-bit weights whole"),
    (
        base("grpo", lora={"sync": "adapter"}, rollout={"engine": "transformers"}),
        "lora.sync: the engine of transformers takes whole weights",
    ),
    (base("grpo", lora={}, pipeline={"weight_transfer": "gloo"}), "pipeline.weight_transfer: an adapter is small"),
    (base("grpo", lora={}, rollout={"sleep": 2}), "rollout.sleep: 2 drops the base for good"),
    (base("grpo", lora={"rank": 513}), "lora.rank: vLLM serves adapters up to rank 512"),
    (base("ppo", lora={"quantization": "nf4"}, train={"zero_stage": 3}), "lora.quantization: 4-bit weights are held whole"),
    (
        base("grpo", lora={}, reference={"path": "r"}, algorithm={"kl_coef": 0.1, "reference_refresh": 2}),
        "algorithm.reference_refresh: the adapter that travels fits the base model",
    ),
    (
        base("grpo", evaluate={"path": "e", "success_reward": "exact"}),
        "evaluate.success_reward: no reward is named exact; the recipe has rm",
    ),
    (
        base("grpo", evaluate={"path": "e", "n_samples_per_prompt": 4, "pass_at": [1, 8]}),
        "evaluate.pass_at: pass@8 needs as many samples; n_samples_per_prompt is 4",
    ),
]


@pytest.mark.parametrize(("raw", "line"), [*RULES, *OFFLINE_RULES], ids=[line for _, line in [*RULES, *OFFLINE_RULES]])
def test_settings_that_contradict_each_other_are_refused_with_the_reason(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe(raw)
    text = str(caught.value)
    assert text.startswith(f"recipe: {line}") and "\n" not in text


def test_every_reason_is_given_by_one_of_these() -> None:
    """A rule that is added is to be tried too."""
    modules = (rules, offline_rules, reward_rules, engine_rules, lora_rules)
    given: dict[str, set[int]] = {str(module.__file__): set() for module in modules}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in given:
            return None
        if event == "line":
            given[frame.f_code.co_filename].add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for raw in [*(GRPO | changes for changes, _ in BAD), *(raw for raw, _ in [*RULES, *OFFLINE_RULES])]:
            with suppress(UserError):
                parse_recipe(raw)
    finally:
        sys.settrace(before)
    for file, lines_run in given.items():
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        reasons = [range(node.lineno, (node.end_lineno or 0) + 1) for node in ast.walk(tree) if isinstance(node, ast.Yield)]
        assert reasons, file
        assert [(file, lines.start) for lines in reasons if not lines_run.intersection(lines)] == []


@pytest.mark.parametrize("method", DEFAULTS)
def test_every_preset_loads(method: str) -> None:
    if method in LOOPS:
        made = parse_recipe(loop(method))
        assert isinstance(made, LoopRecipe)
    else:
        made = parse_recipe(base(method, FUNCTION, reference={"path": "r"}, **({"pipeline": {"micro_batch_size": 2}})))
        assert isinstance(made, OnlineRecipe) and made.method == method
    dumped = made.model_dump()
    for section, keys_of in DEFAULTS[method].items():
        assert {key: dumped[section][key] for key in keys_of} == keys_of


def test_methods_are_those_of_the_issue_and_each_has_a_preset() -> None:
    estimators = {"ppo", "grpo", "dr_grpo", "rloo", "opo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax"}
    online = estimators | {"dapo", "gspo", "cispo", "distillation", "online_dpo"}
    assert set(METHOD_DEFAULTS) == online and set(LOOP_DEFAULTS) == LOOPS and set(METHODS) == online | LOOPS | OFFLINE


def test_sizes_with_a_greedy_baseline() -> None:
    made = parse_recipe(
        base(
            "remax",
            rollout={"n_samples_per_prompt": 2},
            train={"rollout_batch_size": 6, "train_batch_size": 4},
            pipeline={"micro_batch_size": 2},
            algorithm={"policy_loss": "ppo_clip"},
        )
    )
    assert isinstance(made, OnlineRecipe)
    assert (made.samples_per_group, made.samples_per_step, made.samples_per_update) == (3, 18, 6)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "empty"),
        ("- a\n", "not one"),
        ("a: [1\n", "not valid YAML"),
        ("method: sft\n", "missing"),
        ("seed: 1\nseed: 2\n", "the key seed stands there twice"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        load_recipe(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_bad_override(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such recipe file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is not a section"):
        load_recipe(write(tmp_path, GRPO), {"method.x": "1"})
    with pytest.raises(UserError, match=r"rollout\.tmeperature: unknown key"):
        load_recipe(write(tmp_path, GRPO), {"rollout.tmeperature": "1"})


def test_a_number_may_come_as_text_as_yaml_reads_1e_6(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GRPO), {"train.learning_rate": "1e-6"})
    assert recipe.train.learning_rate == 1e-6


def test_list_entries_can_be_overridden(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GRPO), {"rewards.0.weight": "0.5"})
    assert isinstance(recipe, OnlineRecipe) and recipe.rewards[0].weight == 0.5


@pytest.mark.parametrize("path", sorted(Path("recipes").rglob("*.yaml")), ids=str)
def test_every_shipped_recipe_parses(path: Path) -> None:
    assert isinstance(load_recipe(path), OnlineRecipe | OfflineRecipe | LoopRecipe)


@pytest.mark.parametrize("method", METHODS)
def test_every_key_says_what_it_means(method: str) -> None:
    described = keys(method)
    assert not [key.name for key in described if not key.help and key.name != "method"]
    assert len({key.name for key in described}) == len(described)
