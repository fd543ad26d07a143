"""The app behind `conveyor serve-reward`: a reward model, or a reward function, that answers over HTTP.

    request ─▶ its samples ─┐
    request ─▶ its samples ─┴▶ queue ─▶ one thread: what waits, sorted by length, in padded batches ─▶ scores

The protocol is that of `client.py`. Refusals are `{"detail": "one line"}`: 401 no or a wrong token, 413 too
large, 422 malformed, 503 too much waits already.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from conveyor.config import UserError, sections
from conveyor.data.packing import lay_out
from conveyor.data.tokenizer import check_folder_or_hub_id, encode_prompt, encode_texts
from conveyor.models.attention import packs
from conveyor.models.scalar_model import load_scalar_model, sequence_scores
from conveyor.rewards.functions import MOST_NESTING, nests_deeper, text_of
from conveyor.rewards.process import CallFailed, CallMiscounted, CallTimeout, FunctionProcess

log = logging.getLogger(__name__)

MOST_WAITING = 16
"""Requests of the largest size whose samples may wait; beyond that clients are told to come again."""


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: Any = None


Messages = list[Message]


class Ask(BaseModel):
    """The body of a request; every further key is a column, or an argument of a function."""

    model_config = ConfigDict(extra="allow", strict=True)
    prompts: list[str | Messages] = Field(min_length=1)
    completions: list[str | Messages]
    truncated: list[bool] | None = None

    def problem(self) -> str | None:
        """What is wrong beyond the types, in one line."""
        if len(self.completions) != len(self.prompts):
            return f"completions: {len(self.completions)} for {len(self.prompts)} prompts"
        if self.truncated is not None and len(self.truncated) != len(self.prompts):
            return f"truncated: {len(self.truncated)} for {len(self.prompts)} prompts"
        if not all(isinstance(one, str) or (len(one) == 1 and isinstance(one[0].content, str)) for one in self.completions):
            return "completions: each is a text, or one message with a text"
        if [] in self.prompts:
            return "prompts: one of them has no messages"
        return None


class Scorer(Protocol):
    """What a server serves."""

    async def scores(self, ask: Ask) -> list[float | None]:
        """Raises HTTPException."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one request."""

    request_bytes: int
    samples: int


def create_app(scorer: Scorer, limits: Limits, token: str | None) -> FastAPI:
    """token: clients must send it as `Authorization: Bearer TOKEN`; None: anybody who can connect may ask."""
    app = FastAPI(title="Conveyor reward server", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/")
    async def judge(request: Request) -> JSONResponse:
        if token is not None:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, b"Bearer " + token.encode()):
                raise HTTPException(401, "no token, or a wrong one", {"www-authenticate": "Bearer"})
        ask = _parsed(await _read(request, limits.request_bytes))
        if len(ask.prompts) > limits.samples:
            raise HTTPException(413, f"{len(ask.prompts)} samples in one request; at most {limits.samples} (--max-samples)")
        return JSONResponse({"scores": await scorer.scores(ask)})

    return app


async def _read(request: Request, most: int) -> bytes:
    """The body; what is too large is not kept in memory, whatever its header says."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise HTTPException(413, f"more than {most} bytes in one request (--max-request-bytes)")
    return bytes(body)


def _parsed(body: bytes) -> Ask:
    try:
        told = json.loads(body)
        if nests_deeper(told):
            raise HTTPException(422, f"the body is nested more than {MOST_NESTING} deep")
        json.dumps(told, ensure_ascii=False).encode()  # half of a surrogate pair
        ask = Ask.model_validate(told)
    except ValidationError as error:
        first = error.errors()[0]
        # The branch of a union that was tried is no place in the body.
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or (part.isidentifier() and part != "str"))
        raise HTTPException(422, f"{place or 'the body'}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"the body is not JSON: {error}") from None
    if (problem := ask.problem()) is not None:
        raise HTTPException(422, problem)
    return ask


@dataclass(frozen=True, slots=True)
class _Waiting:
    prompt: Any
    text: str
    truncated: bool
    score: Future[float]


class ModelScorer:
    """A reward model. Samples of requests that come at the same time share batches."""

    def __init__(self, model: str, *, max_batch: int, dtype: str, device: str, apply_chat_template: bool, most_waiting: int) -> None:
        """Loads the model.

        Args:
            max_batch: samples in one forward pass.
            dtype: float32 or bfloat16.
            apply_chat_template: put text prompts through the model's chat template as one user message.
            most_waiting: samples that may wait for a batch.

        Raises:
            UserError: no such model, or one that is no reward model.
        """
        check_folder_or_hub_id("MODEL", model)
        self._tokenizer = _tokenizer(model)
        section = sections.Model(path=model, dtype=dtype)
        self._model = load_scalar_model(section).eval().requires_grad_(False).to(device)
        self._device, self._max_batch, self._apply_chat_template = device, max_batch, apply_chat_template
        self._longest: int | None = getattr(self._model.config, "max_position_embeddings", None)
        self._most_waiting = most_waiting
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="reward model", daemon=True)
        self._thread.start()

    async def scores(self, ask: Ask) -> list[float | None]:
        if self._queue.qsize() + len(ask.prompts) > self._most_waiting:
            raise HTTPException(503, f"{self._queue.qsize()} samples wait already; come again later")
        futures: list[Future[float]] = []
        for place, (prompt, completion) in enumerate(zip(ask.prompts, ask.completions, strict=True)):
            futures.append(Future())
            truncated = ask.truncated is not None and ask.truncated[place]
            self._queue.put(_Waiting(_plain(prompt), text_of(_plain(completion)), truncated, futures[-1]))
        scores = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        answers: list[float | None] = []
        for score in scores:
            if isinstance(score, ValueError):
                raise HTTPException(422, str(score))
            if isinstance(score, BaseException):
                raise score
            answers.append(score)
        return answers

    def close(self) -> None:
        """End the thread, after what waits."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            waiting = [first]
            while not self._queue.empty():
                if (more := self._queue.get()) is None:
                    self._queue.put(None)
                    break
                waiting.append(more)
            wanted = [one for one in waiting if one.score.set_running_or_notify_cancel()]
            encoded = sorted(self._encoded(wanted), key=lambda pair: len(pair[1]))
            for start in range(0, len(encoded), self._max_batch):
                self._score(encoded[start : start + self._max_batch])

    def _encoded(self, waiting: Iterable[_Waiting]) -> Iterable[tuple[_Waiting, list[int]]]:
        for one in waiting:
            try:
                ids = self.encode(one.prompt, one.text, one.truncated)
            except Exception as error:
                one.score.set_exception(error)
            else:
                yield one, ids

    def encode(self, prompt: str | list[dict[str, Any]], text: str, truncated: bool) -> list[int]:
        """Token ids as the score stage makes them from texts: the model's own chat template, and its own end token
        where the sample was not cut.

        Raises:
            ValueError: longer than the model takes, or refused by the chat template.
        """
        end = [] if truncated else [self._tokenizer.eos_token_id]
        try:
            ids = encode_prompt(self._tokenizer, prompt, self._apply_chat_template) + encode_texts(self._tokenizer, [text])[0] + end
        except UserError as error:
            raise ValueError(str(error)) from None
        if self._longest is not None and len(ids) > self._longest:
            raise ValueError(f"a sample has {len(ids)} tokens, the model takes {self._longest}")
        return ids

    @torch.inference_mode()
    def _score(self, batch: list[tuple[_Waiting, list[int]]]) -> None:
        try:
            tokens = lay_out([ids for _, ids in batch], packs(self._model))
            scores = sequence_scores(self._model, tokens.to(self._device)).tolist()
        except Exception as error:  # out of memory, say: these samples fail (status 500), others may not
            log.exception("a batch of %d samples of up to %d tokens failed", len(batch), max(len(ids) for _, ids in batch))
            for one, _ in batch:
                one.score.set_exception(RuntimeError(str(error)))
            return
        for (one, _), score in zip(batch, scores, strict=True):
            if math.isfinite(score):
                one.score.set_result(score)
            else:
                one.score.set_exception(ValueError(f"the model's score of a sample is {score}"))


class FunctionScorer:
    """A reward function in a process of its own; requests are answered one after the other."""

    def __init__(self, named: str, *, timeout: float) -> None:
        """timeout: seconds for one request.

        Raises:
            UserError: the function cannot be loaded.
        """
        self._process = FunctionProcess(named, "MODEL")
        self._process.start()
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1)
        self._waiting = 0

    async def scores(self, ask: Ask) -> list[float | None]:
        arguments = ask.model_dump()
        if ask.truncated is None:
            del arguments["truncated"]
        if self._waiting >= MOST_WAITING:
            raise HTTPException(503, f"{self._waiting} requests wait already; come again later")
        call = self._thread.submit(self._process.call, arguments, self._timeout)
        self._waiting += 1
        try:
            return await asyncio.wrap_future(call)
        except CallTimeout as error:
            raise HTTPException(504, f"the function: {error}") from None
        except (CallFailed, CallMiscounted) as error:  # it would fail again
            raise HTTPException(422, f"the function {error}") from None
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._process.end()
        self._thread.shutdown(cancel_futures=True)


def _plain(value: str | Messages) -> str | list[dict[str, Any]]:
    return value if isinstance(value, str) else [message.model_dump() for message in value]


def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UserError(f"MODEL: no tokenizer can be read from {Path(model)}: {str(error).strip().splitlines()[0]}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"MODEL: the tokenizer of {model} has no end-of-sequence token")
    return tokenizer
