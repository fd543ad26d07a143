"""The score stage: everything about a sample that neither sampling nor training tells.

    rollouts ──▶ reference model ──▶ reference_logprobs ┐
             ──▶ policy snapshot ──▶ old_logprobs       ├─▶ PartialScores
             ──▶ critic snapshot ──▶ values             │
             ──▶ reward models   ──▶ rewards            ┘

A worker holds the roles of one device group and computes those it is asked for, one after the
other. With `score.zero_stage: 3` the workers of a group are the ranks of one team: together they hold one copy of each model, and each
computes a share of the samples. Rewards that are functions or urls have a worker of their own (`workers/reward.py`).
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch import distributed as dist
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from conveyor.config import OnlineRecipe, RunError, UserError, sections
from conveyor.data.balance import micro_batches
from conveyor.data.packing import lay_out
from conveyor.data.tokenizer import encode_prompt, encode_texts, load_tokenizer
from conveyor.models.adapters import adapters_off
from conveyor.models.answering import Answering, WholeModel
from conveyor.models.attention import packs
from conveyor.models.collectives import limit_collectives
from conveyor.models.inference_engine import InferenceEngine
from conveyor.models.joining import join, per_sample
from conveyor.models.language_model import response_logprobs
from conveyor.models.process_scores import process_scores
from conveyor.models.scalar_model import load_scalar_model, response_values, sequence_scores
from conveyor.models.zero import offloading, partitioning
from conveyor.types import PartialScores, Rollout
from conveyor.workers.policies import load_policy, shared_reference
from conveyor.workers.records import fetch_rollouts
from conveyor.workers.rendezvous import Membership
from conveyor.workers.reports import InstallReport, Publication, ScoreReport, Span, WorkerInfo
from conveyor.workers.sleeping import Sleeper
from conveyor.workers.weight_sync import Bucket, checked, read


class ScoreWorker(Sleeper):
    """Scores micro-batches. The same micro-batch gives the same bits."""

    def __init__(
        self, recipe: OnlineRecipe, roles: tuple[str, ...], *, cores: tuple[int, ...] | None, team: Membership | None = None
    ) -> None:
        """Args:
        roles: of `recipe.score_roles` and `recipe.snapshot_roles`, those placed here.
        cores: core ids on CPU; None: GPU.
        team: the ranks that hold the models together; default: each worker holds them whole.
        """
        self._recipe, self._roles, self._cores, self._team = recipe, roles, cores, team
        self._models: dict[str, Answering] = {}
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        """Reward models that need the text encoded anew."""
        self._rewards = {reward.name: reward for reward in recipe.model_rewards}
        self._separators: dict[str, tuple[list[int], int]] = {}
        """Process reward models: tokens that end a step, and EOS, as they know them."""
        self._shared = shared_reference(recipe, roles)
        """The reference is the policy snapshot without its adapter."""
        self._versions: dict[str, int] = {}
        self._device = torch.device("cuda" if cores is None else "cpu")
        if cores is not None:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        if team is not None and not dist.is_initialized():
            backend = "gloo" if cores is not None else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, init_method=f"tcp://{team.address}:{team.port}", rank=team.rank, world_size=team.ranks,
                                    timeout=timedelta(seconds=recipe.ray.timeout))  # fmt: skip

    def hold(self, role: str, model: Answering) -> None:
        """A role's model is there already."""
        self._models[role] = model

    def ready(self) -> WorkerInfo:
        """Loads the roles.

        Raises:
            UserError: a model that cannot be used.
        """
        for role in self._roles:
            if role not in self._models and not (role == "reference" and self._shared):
                self._models[role] = self._answering(role)
        limit_collectives(self._recipe.ray.timeout)
        device = torch.cuda.get_device_name() if self._cores is None else "cpu " + ",".join(map(str, self._cores))
        return WorkerInfo("score", socket.gethostname(), os.getpid(), device)

    def _answering(self, role: str) -> Answering:
        reward = self._rewards.get(role)
        if self._team is None:
            return WholeModel(self._load(role, reward), self._device)
        settings = self._recipe.score
        accelerator: Literal["cpu", "cuda"] = "cuda" if self._cores is None else "cpu"
        placed = offloading(accelerator, parameters=settings.offload_parameters, nvme_path=settings.nvme_path)
        section = {"reference": self._recipe.reference, "critic_snapshot": self._recipe.critic}.get(role) or self._recipe.model
        with partitioning(section.dtype, accelerator, placed):
            model = self._load(role, reward)
        return InferenceEngine(
            model, accelerator=accelerator, offload_parameters=settings.offload_parameters, nvme_path=settings.nvme_path
        )  # fmt: skip

    def _memory(self) -> Any:
        return self._models

    def score(self, roles: tuple[str, ...], rollouts: Sequence[Any]) -> tuple[ScoreReport, PartialScores | None]:
        """What `roles` say of a micro-batch of rollouts (or references to them), sample by sample; of a team rank 0 knows it."""
        start = time.time()
        samples = fetch_rollouts(rollouts)
        found = {role: self._of_all(role, samples) for role in roles}
        if self._team is not None and self._team.rank:
            return ScoreReport(Span(start, time.time())), None
        for name in found.keys() & self._rewards.keys():
            if not all(math.isfinite(score) for score in found[name]):
                raise RunError(f"rewards.{name}: the model {self._rewards[name].model} gave a score that is not finite")
        partial = PartialScores(
            rewards={role: scores for role, scores in found.items() if role in self._rewards},
            reference_logprobs=found.get("reference"),
            old_logprobs=found.get("policy_snapshot"),
            values=found.get("critic_snapshot"),
        )
        return ScoreReport(Span(start, time.time())), partial

    def install(self, role: str, publication: Publication, *, get: Callable[[Any], Bucket] | None = None) -> InstallReport:
        """Overwrite a snapshot's weights in place. `get` is that of `weight_sync.read`.

        Raises:
            RuntimeError: the publication lacks a weight of the snapshot, or has one that it lacks.
        """
        start = time.time()
        assert publication.version >= self._versions.get(role, 0), f"{role}: version {publication.version} after {self._versions[role]}"
        mismatched: list[str] = []
        self._models[role].overwrite(checked(read(publication, get=get), publication.checksums, mismatched))
        self._versions[role] = publication.version
        return InstallReport(publication.version, publication.nbytes, Span(start, time.time()), tuple(mismatched))

    def save_weights(self, role: str, folder: str | Path) -> None:
        """A model that was installed, for a checkpoint."""
        keeps = self._team is None or self._team.rank == 0
        weights: dict[str, Tensor] = {}
        with self._awake():
            for name, weight in self._models[role].named_weights():
                if keeps:
                    weights[name] = weight.clone()
        if keeps:
            save_file(weights, str(Path(folder) / f"{role}.safetensors"))
        if self._team is not None:
            dist.barrier()

    def load_weights(self, role: str, folder: str | Path) -> None:
        """What `save_weights` wrote.

        Raises:
            UserError: the file is not there, or of another model.
        """
        file = Path(folder) / f"{role}.safetensors"
        try:
            with self._awake():
                self._models[role].overwrite(load_file(str(file)).items())
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"checkpoint.resume: {file} cannot be read: {reason}; resume from another checkpoint") from error

    def _load(self, role: str, reward: sections.Reward | None) -> PreTrainedModel:
        recipe = self._recipe
        if role in ("reference", "policy_snapshot", "critic_snapshot"):
            return load_policy(recipe, role)
        assert reward is not None and reward.model is not None, role
        tokenizer = _reward_tokenizer(reward)
        if tokenizer.get_vocab() != load_tokenizer(recipe.model).get_vocab():
            self._tokenizers[role] = tokenizer
        if reward.steps is not None:
            (separator,) = encode_texts(tokenizer, [reward.steps.separator])
            self._separators[role] = separator, int(tokenizer.eos_token_id)
        return load_scalar_model(recipe.model.model_copy(update={"path": reward.model, "rope_scaling": None}), new_head=False)

    def _of_all(self, role: str, samples: Sequence[Rollout]) -> tuple[Any, ...]:
        """What a role says of each sample: a score of a reward model, else float32 [R]. A pass has as many tokens as the trainer's."""
        lengths = [len(sample.prompt.token_ids) + len(sample.response_ids) for sample in samples]
        rank, ranks = (0, 1) if self._team is None else (self._team.rank, self._team.ranks)
        found: dict[int, Any] = {}
        for shares in micro_batches(lengths, ranks, self._recipe.train.max_tokens_per_micro_batch):
            mine = shares[rank]
            values = self._run(role, [samples[number] for number in mine] or samples[:1])  # every rank makes every pass
            found |= zip(mine, values, strict=bool(mine))
        if self._team is not None:
            of_ranks: list[Any] = [None] * ranks
            dist.all_gather_object(of_ranks, found)
            found = {number: value for of_rank in of_ranks for number, value in of_rank.items()}
        return tuple(found[number] for number in range(len(samples)))

    def _run(self, role: str, samples: Sequence[Rollout]) -> Iterable[Any]:
        unadapted = role == "reference" and self._shared
        model = self._models["policy_snapshot" if unadapted else role]
        packed = packs(model.model)
        if role in self._rewards:
            ids = [self._ids(role, sample) for sample in samples]
            if (steps := self._rewards[role].steps) is not None:
                return model.forward(process_scores, ids, steps, *self._separators[role]).tolist()
            tokens = lay_out([[*prompt, *response] for prompt, response in ids], packed)
            return model.forward(sequence_scores, tokens.to(self._device)).tolist()
        batch = join(samples, packed).to(self._device)
        arguments = (batch.tokens, batch.prompt_lengths, batch.response_mask)
        if role == "critic_snapshot":
            return per_sample(model.forward(response_values, *arguments), batch)
        with adapters_off(model.model) if unadapted else nullcontext():
            return per_sample(model.forward(response_logprobs, *arguments, self._recipe.rollout.temperature)[0], batch)

    def _ids(self, role: str, sample: Rollout) -> tuple[list[int], list[int]]:
        """Prompt and response in the tokens of a reward model."""
        if role in self._tokenizers:
            return reencode(sample, self._tokenizers[role], self._recipe.data.apply_chat_template)
        return list(sample.prompt.token_ids), sample.response_ids.tolist()


def _reward_tokenizer(reward: sections.Reward) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(reward.model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"rewards.{reward.name}.model: no tokenizer can be read from {reward.model}: {reason}") from error


def reencode(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool) -> tuple[list[int], list[int]]:
    """Prompt and response for a model with another tokenizer than the policy's, from their text.

    Its own chat template renders the prompt, and its own end token stands where the policy ended by itself.
    """
    prompt = rollout.prompt.text if rollout.prompt.messages is None else list(rollout.prompt.messages)
    (response,) = encode_texts(tokenizer, [rollout.text])
    end = [] if rollout.truncated else [tokenizer.eos_token_id]
    return encode_prompt(tokenizer, prompt, apply_chat_template), response + end
