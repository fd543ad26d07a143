"""`conveyor serve-reward`: a reward model or function for recipes elsewhere, which name its address as `url`."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket

import torch
import uvicorn

from conveyor.config import UserError
from conveyor.rewards.server import MOST_WAITING, FunctionScorer, Limits, ModelScorer, Scorer, create_app


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a sequence classifier with one label; or path.py:function")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; beyond this machine only with a token; default: %(default)s"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any free one; default: %(default)s")
    parser.add_argument("--token-variable", metavar="NAME", help="environment variable with the token that clients must send")
    parser.add_argument("--max-batch", type=int, default=32, metavar="N", help="samples in one forward pass; default: %(default)s")
    parser.add_argument("--max-request-bytes", type=int, default=16 * 2**20, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-samples", type=int, default=1024, metavar="N", help="in one request; default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model's weights; default: %(default)s")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 …; default: cuda where there is a GPU")
    parser.add_argument("--no-chat-template", action="store_true", help="take text prompts as they stand (data.apply_chat_template: false)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for one request to a function; default: %(default)s"
    )


def run(known: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Serve until interrupted. Raises UserError for bad input."""
    if overrides:
        raise UserError(f"serve-reward: --{next(iter(overrides))}: unknown argument")
    token = _token(known.token_variable)
    if token is None and not _is_loopback(known.host):
        raise UserError(f"--host: {known.host} can be reached from other machines; name a token with --token-variable NAME")
    for option in ("max_batch", "max_request_bytes", "max_samples", "timeout"):
        if getattr(known, option) <= 0:
            raise UserError(f"--{option.replace('_', '-')}: must be more than 0")
    if not 0 <= known.port <= 65535:
        raise UserError(f"--port: {known.port} is not one of 0 … 65535")
    listening = _listen(known.host, known.port)
    scorer = _scorer(known)
    try:
        app = create_app(scorer, Limits(known.max_request_bytes, known.max_samples), token)
        listening.listen()  # from here on clients are let in; not while the model loads
        print(f"serving {known.model} on {_address(listening)}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
    finally:
        scorer.close()
        listening.close()
    return 0


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise UserError(f"--token-variable: the environment variable {variable} is not set")
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: what it stands for may change
        return False


def _listen(host: str, port: int) -> socket.socket:
    """Before the model is loaded, so that a port in use is known at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UserError(f"serve-reward: cannot listen on {host}:{port}: {error}") from None
    return listening


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _scorer(known: argparse.Namespace) -> Scorer:
    where, _, function = known.model.rpartition(":")
    if where and function:
        return FunctionScorer(known.model, timeout=known.timeout)
    device = known.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device: {device}: {str(error).splitlines()[0]}") from None
    return ModelScorer(
        known.model, max_batch=known.max_batch, dtype=known.dtype, device=device, apply_chat_template=not known.no_chat_template,
        most_waiting=MOST_WAITING * known.max_samples,
    )  # fmt: skip
