"""The score stage: everything about a sample that neither sampling nor training tells.

    rollouts ──▶ reference model ──▶ reference_logprobs ┐
             ──▶ policy snapshot ──▶ old_logprobs       ├─▶ PartialScores
             ──▶ critic snapshot ──▶ values             │
             ──▶ reward models, reward functions ──▶ rewards ┘

A worker holds the roles of one device group and computes those it is asked for, one after the
other; reward functions run in processes of their own meanwhile.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from conveyor.config import OnlineRecipe, UserError, sections
from conveyor.data.tokenizer import encode_prompt, encode_texts, load_tokenizer
from conveyor.models.joining import Joined, join, pad_right, per_sample
from conveyor.models.language_model import load_language_model, response_logprobs
from conveyor.models.scalar_model import load_critic, load_scalar_model, response_values, sequence_scores
from conveyor.rewards import FunctionReward, FunctionScores
from conveyor.run_folder import RunFolder
from conveyor.types import PartialScores, Rollout
from conveyor.workers.records import fetch_rollouts
from conveyor.workers.reports import InstallReport, Publication, ScoreReport, Span, WorkerInfo
from conveyor.workers.weight_sync import Bucket, checked, read


class ScoreWorker:
    """Scores micro-batches. The same micro-batch gives the same bits."""

    def __init__(self, recipe: OnlineRecipe, roles: tuple[str, ...], *, cores: tuple[int, ...] | None) -> None:
        """Args:
        roles: of `recipe.score_roles` and `recipe.snapshot_roles`, those placed here.
        cores: core ids on CPU; None: GPU.
        """
        self._recipe, self._roles, self._cores = recipe, roles, cores
        self._models: dict[str, PreTrainedModel] = {}
        self._functions: dict[str, FunctionReward] = {}
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        """Reward models that need the text encoded anew."""
        self._versions: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(max(1, len(recipe.rewards)))
        self._device = torch.device("cuda" if cores is None else "cpu")
        if cores is not None:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))

    def ready(self) -> WorkerInfo:
        """Loads the roles, functions first.

        Raises:
            UserError: a function or model that cannot be used.
        """
        rewards = {reward.name: reward for reward in self._recipe.rewards if reward.name in self._roles}
        for name, reward in rewards.items():
            if reward.function is not None and name not in self._functions:
                self._functions[name] = FunctionReward(reward, RunFolder(self._recipe.output_dir).rewards_log)
                self._functions[name].start()
        for role in self._roles:
            if role not in self._functions and role not in self._models:
                model = self._load(role, rewards.get(role)).eval()  # also ends gradient checkpointing
                self._models[role] = model.to(self._device).requires_grad_(False)
        device = torch.cuda.get_device_name() if self._cores is None else "cpu " + ",".join(map(str, self._cores))
        return WorkerInfo("score", socket.gethostname(), os.getpid(), device)

    @torch.inference_mode()
    def score(self, roles: tuple[str, ...], rollouts: Sequence[Any]) -> tuple[ScoreReport, PartialScores]:
        """What `roles` say of a micro-batch of rollouts (or references to them), sample by sample.

        Raises:
            RewardError: a reward function failed and the recipe says stop.
        """
        start = time.time()
        samples = fetch_rollouts(rollouts)
        calls = {name: self._threads.submit(self._functions[name].score, samples) for name in roles if name in self._functions}
        batch = join(samples).to(self._device)
        models = {role: self._run(role, batch, samples) for role in roles if role not in self._functions}
        answers: dict[str, FunctionScores] = {name: call.result() for name, call in calls.items()}
        named = {reward.name for reward in self._recipe.rewards}
        rewards = {role: tuple(scores.tolist()) for role, scores in models.items() if role in named}
        tokens = {role: per_sample(values, batch.response_mask) for role, values in models.items() if role not in named}
        partial = PartialScores(
            rewards={name: rewards[name] if name in rewards else answers[name].scores for name in roles if name in named},
            reference_logprobs=tokens.get("reference"),
            old_logprobs=tokens.get("policy_snapshot"),
            values=tokens.get("critic_snapshot"),
        )
        timeouts, errors = sum(answer.timeouts for answer in answers.values()), sum(answer.errors for answer in answers.values())
        return ScoreReport(Span(start, time.time()), timeouts, errors), partial

    def install(self, role: str, publication: Publication, *, get: Callable[[Any], Bucket] | None = None) -> InstallReport:
        """Overwrite a snapshot's weights in place. `get` is that of `weight_sync.read`.

        Raises:
            RuntimeError: the publication lacks a weight of the snapshot, or has one that it lacks.
        """
        start = time.time()
        assert publication.version >= self._versions.get(role, 0), f"{role}: version {publication.version} after {self._versions[role]}"
        mismatched: list[str] = []
        _overwrite(self._models[role], checked(read(publication, get=get), publication.checksums, mismatched))
        self._versions[role] = publication.version
        return InstallReport(publication.version, publication.nbytes, Span(start, time.time()), tuple(mismatched))

    def close(self) -> None:
        """End the reward functions' processes (they also end with the worker)."""
        for function in self._functions.values():
            function.close()
        self._threads.shutdown()

    def _load(self, role: str, reward: sections.Reward | None) -> PreTrainedModel:
        recipe = self._recipe
        if role == "reference":
            return load_language_model(recipe.reference or recipe.model)
        if role == "policy_snapshot":
            return load_language_model(recipe.model)
        if role == "critic_snapshot":
            return load_critic(recipe)
        assert reward is not None and reward.model is not None, role
        tokenizer = _reward_tokenizer(reward)
        if tokenizer.get_vocab() != load_tokenizer(recipe.model).get_vocab():
            self._tokenizers[role] = tokenizer
        return load_scalar_model(recipe.model.model_copy(update={"path": reward.model}), new_head=False)

    def _run(self, role: str, batch: Joined, samples: Sequence[Rollout]) -> Tensor:
        """[B] for a reward model, [B, S] for the others."""
        model = self._models[role]
        if role in ("reference", "policy_snapshot"):
            logprobs, _ = response_logprobs(
                model, batch.input_ids, batch.attention_mask, batch.prompt_lengths, batch.response_mask, self._recipe.rollout.temperature
            )
            return logprobs
        if role == "critic_snapshot":
            return response_values(model, batch.input_ids, batch.attention_mask, batch.prompt_lengths, batch.response_mask)
        if role not in self._tokenizers:
            return sequence_scores(model, batch.input_ids, batch.attention_mask)
        anew = [reencode(sample, self._tokenizers[role], self._recipe.data.apply_chat_template) for sample in samples]
        input_ids, attention_mask = pad_right([torch.tensor(ids) for ids in anew])
        return sequence_scores(model, input_ids.to(self._device), attention_mask.to(self._device))


def _reward_tokenizer(reward: sections.Reward) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(reward.model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"rewards.{reward.name}.model: no tokenizer can be read from {reward.model}: {reason}") from error


def reencode(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool) -> list[int]:
    """Prompt and response for a model with another tokenizer than the policy's, from their text.

    Its own chat template renders the prompt, and its own end token stands where the policy ended by itself.
    """
    prompt = rollout.prompt.text if rollout.prompt.messages is None else list(rollout.prompt.messages)
    (response,) = encode_texts(tokenizer, [rollout.text])
    end = [] if rollout.truncated else [tokenizer.eos_token_id]
    return encode_prompt(tokenizer, prompt, apply_chat_template) + response + end


def _overwrite(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy named weights into a model. Tied weights may come under any one of their names."""
    own = dict(model.named_parameters(remove_duplicate=False))
    missing = {id(parameter): name for name, parameter in own.items()}
    with torch.no_grad():
        for name, tensor in weights:
            if name not in own:
                raise RuntimeError(f"the snapshot has no weight {name}")
            own[name].copy_(tensor)
            missing.pop(id(own[name]), None)
    if missing:
        raise RuntimeError(f"weights never came: {', '.join(sorted(missing.values()))}")
