"""A rollout engine without vLLM: a transformers model in this process, with continuous batching.

    add ──▶ waiting ──▶ rows: a slot of the cache each ──▶ one token for every row ──▶ those that ended leave, the last row moves up
                          │ filled when they join, and                  ▲
                          │ anew after an install                       └── the row's own random numbers

transformers has continuous batching of its own (`generation/continuous_batching`, read in 5.19), which this does not use. Its tokens
are drawn for a whole batch by one global generator, so a sample would depend on the others in its batch; it has no stop strings; and its
loop runs in a thread of its own, whose pause keeps the caches of the old weights. What is used are the library's models and the
interface of its caches (`models/slot_cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from conveyor.config import RunError, UserError, sections
from conveyor.data.stop_strings import StopSearch
from conveyor.data.tokenizer import load_tokenizer
from conveyor.episodes.episode import Sampled
from conveyor.models.answering import WholeModel
from conveyor.models.language_model import load_language_model
from conveyor.models.sampling import Draws, sample
from conveyor.models.slot_model import SlotModel
from conveyor.workers.reports import Publication
from conveyor.workers.weight_sync import checked, read


@dataclass(slots=True, eq=False)
class _Request:
    ids: list[int]
    """The prompt, and what has been sampled."""
    limit: int
    """Length of `ids` that cuts it."""
    temperature: float
    draws: Draws
    search: StopSearch | None
    done: Callable[[Sampled], None]
    name: str
    start: tuple[int, ...]
    """The prompt without its last token: what the cache holds before the first step."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    filled: bool = False
    """Its slot holds keys and values of all `ids` but the last."""

    def sampled(self, reason: Literal["stop", "length"]) -> Sampled:
        count = len(self.logprobs)
        logprobs, versions = torch.tensor(self.logprobs), torch.tensor(self.versions, dtype=torch.int32)
        return Sampled(self.ids[len(self.ids) - count :], logprobs, versions, reason)


class TransformersEngine:
    """`workers/engine.py`'s Engine. The most rows at a time are `rollout.max_concurrent_requests`; further requests wait."""

    def __init__(
        self, model: SlotModel, tokenizer: PreTrainedTokenizerBase, settings: sections.Rollout, max_model_len: int | None = None
    ) -> None:
        """`max_model_len`: longest prompt + response in tokens; default: the model's own limit.

        Raises:
            UserError: the model's places depend on the longest sample of the batch, and samples may be that long.
        """
        self.version = 0
        self.asleep = False
        self._device = model.model.device
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._whole = WholeModel(model.model, self._device)
        config = model.model.config.get_text_config()
        self._longest = max_model_len or getattr(config, "max_position_embeddings", None)
        rotary = getattr(config, "rope_parameters", None) or {}
        short = rotary.get("original_max_position_embeddings")
        if rotary.get("rope_type") == "longrope" and self._longest is not None and short is not None and self._longest > short:
            raise UserError(
                f"rollout.engine: with samples of up to {self._longest} tokens, more than {short}, the model's longrope embeddings would "
                "make samples of one batch depend on each other; use vllm, or lower max_prompt_length and max_response_length"
            )
        self._ends = _end_tokens(model, tokenizer)
        self._rows: list[_Request] = []
        """By slot."""
        self._waiting: dict[str, _Request] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._rows or self._waiting)

    def add(
        self, token_ids: Sequence[int], done: Callable[[Sampled], None], *, seed: int, temperature: float | None = None,
        max_tokens: int | None = None, stop: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """See `Engine.add`.

        Raises:
            RunError: the prompt leaves no room for a token.
        """
        assert not self.asleep, "a sample was submitted to a sleeping engine"
        settings, name, length = self._settings, str(self._count), len(token_ids)
        if self._longest is not None and length >= self._longest:
            raise RunError(f"rollout: a prompt of {length} tokens leaves no room for a response within the engine's {self._longest}")
        limit = length + (max_tokens or settings.max_response_length)
        stops = [*settings.stop, *stop]
        self._waiting[name] = _Request(
            ids=list(token_ids),
            limit=limit if self._longest is None else min(limit, self._longest),
            temperature=settings.temperature if temperature is None else temperature,
            draws=Draws(seed),
            search=StopSearch(self._text, stops) if stops else None,
            done=done,
            name=name,
            start=tuple(token_ids[:-1]),
        )
        self._count += 1
        return name

    def abort(self, name: str) -> Sampled | None:
        request = self._waiting.pop(name, None)
        if request is None:
            slot = next(slot for slot, row in enumerate(self._rows) if row.name == name)
            request = self._rows[slot]
            self._leave(slot)
        return request.sampled("length") if request.logprobs else None

    def step(self) -> None:
        while self._waiting and len(self._rows) < self._settings.max_concurrent_requests:
            self._rows.append(self._waiting.pop(next(iter(self._waiting))))
        self._fill()
        rows = self._rows
        logits = self._model.decode([row.ids[-1] for row in rows], [len(row.ids) - 1 for row in rows])
        temperatures = torch.tensor([row.temperature for row in rows], device=logits.device)
        draws = torch.tensor([row.draws.next() for row in rows], dtype=torch.float64, device=logits.device)
        tokens, logprobs = sample(logits, temperatures, draws, self._settings.top_k, self._settings.top_p)
        ended: list[tuple[_Request, Literal["stop", "length"]]] = []
        for slot, (token, logprob) in reversed(list(enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)))):
            row = rows[slot]
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
            reason = self._reason(row, token)
            if reason is not None:  # rows behind this one have a token more, too
                self._leave(slot)
                ended.append((row, reason))
        for row, reason in reversed(ended):
            row.done(row.sampled(reason))

    def install(self, publication: Publication) -> tuple[str, ...]:
        mismatched: list[str] = []
        self._whole.overwrite(checked(read(publication), publication.checksums, mismatched))
        self.version = publication.version
        self._forget()
        return tuple(mismatched)

    def sleep(self) -> None:
        """The cache goes and, from a GPU, the weights, to host memory."""
        assert not self, "an engine that samples was put to sleep"
        assert not self.asleep, "a sleeping engine was put to sleep"
        self.asleep = True
        self._forget()
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        assert self.asleep, "an engine that is awake was woken"
        self.asleep = False
        self._move(self._device)

    def shutdown(self) -> None:
        self._rows.clear()
        self._waiting.clear()
        self._forget()

    def _move(self, device: torch.device) -> None:
        model: Any = self._model.model  # transformers types `to` as of another class
        model.to(device)

    def _forget(self) -> None:
        """Caches of all rows are to be computed anew."""
        self._model.clear()
        for row in self._rows:
            row.filled = False

    def _fill(self) -> None:
        """Give rows without a cache theirs. Samples of one prompt have the same beginning, which is computed once."""
        fresh = [slot for slot, row in enumerate(self._rows) if not row.filled]
        if not fresh:
            return
        share = self._settings.enable_prefix_caching
        known = {row.start: slot for slot, row in enumerate(self._rows) if row.filled} if share else {}
        computed, copied = list[int](), dict[int, list[int]]()
        for slot in fresh:
            row = self._rows[slot]
            if not row.logprobs and row.start in known:
                copied.setdefault(known[row.start], []).append(slot)
            elif len(row.ids) > 1:
                computed.append(slot)
            if share:
                known.setdefault(row.start, slot)
            row.filled = True
        if computed:
            self._model.fill([self._rows[slot].ids[:-1] for slot in computed], computed)
        for source, targets in copied.items():
            self._model.copy(source, targets, len(self._rows[source].start))

    def _leave(self, slot: int) -> None:
        """The last row takes the slot of one that leaves."""
        last = self._rows.pop()
        if slot < len(self._rows):
            self._rows[slot] = last
            if last.filled:
                self._model.copy(len(self._rows), [slot], len(last.ids) - 1)

    def _reason(self, row: _Request, token: int) -> Literal["stop", "length"] | None:
        if token in self._ends or (row.search is not None and row.search.ends(token)):
            return "stop"
        return "length" if len(row.ids) == row.limit else None

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _end_tokens(model: SlotModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokenizer's end-of-sequence token, and those that the model's generation config names."""
    config = model.model.generation_config
    named = None if config is None else config.eos_token_id
    more = [] if named is None else [named] if isinstance(named, int) else named
    return frozenset([tokenizer.eos_token_id, *more])


def start_transformers_engine(
    model: sections.Model, rollout: sections.Rollout, max_model_len: int | None, device: torch.device
) -> tuple[TransformersEngine, PreTrainedTokenizerBase]:
    """Load the model, in the engine's own type and attention.

    Raises:
        UserError: the model cannot be loaded, or not be served in batches.
    """
    attention = rollout.engine_args.get("attn_implementation", "sdpa")
    own = {"dtype": rollout.dtype or model.dtype, "attention": attention, "gradient_checkpointing": False, "remove_padding": False}
    loaded: Any = load_language_model(model.model_copy(update=own))
    loaded = loaded.to(device).requires_grad_(False)
    tokenizer = load_tokenizer(model)
    return TransformersEngine(SlotModel(loaded, model.path), tokenizer, rollout, max_model_len), tokenizer
