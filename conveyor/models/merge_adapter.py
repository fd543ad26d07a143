"""`conveyor merge-adapter`: a base and an adapter become one model, which any program loads that knows nothing of adapters."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conveyor.data.tokenizer import check_folder_or_hub_id
from conveyor.errors import UserError
from conveyor.run_folder import check_writable, complete_or_absent, is_filled

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "adapter", metavar="RUN_OR_ADAPTER", help="folder of a run that trained an adapter, or of any LoRA adapter as peft saves it"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the merged model's folder, which must not hold anything yet")
    parser.add_argument("--base", metavar="PATH", help="model folder or hub id; default: the one that the adapter was trained on")
    parser.add_argument(
        "--nf4", action="store_true",
        help="QLoRA: merge into the values that the base has in 4 bits, the policy that was trained; default: into the base as it is",
    )  # fmt: skip


def run(known: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    if overrides:
        raise UserError(f"--{next(iter(overrides))}: unknown argument")
    merge_adapter(Path(known.adapter).expanduser(), Path(known.output).expanduser(), known.base, nf4=known.nf4)
    print(known.output)
    return 0


def merge_adapter(adapter: Path, output: Path, base: str | None = None, *, nf4: bool = False) -> None:
    """Write base and adapter, merged, to a folder that `from_pretrained` loads; complete or absent.

    Args:
        adapter: a run's folder, or an adapter's.
        base: model folder or hub id; default: what the adapter names.
        nf4: give the base's linear layers the values that they have in 4 bits first.

    Raises:
        UserError: there is no adapter or base, they do not fit each other, or the output holds something.
    """
    folder = adapter_folder(adapter)
    config = _read_config(folder)
    base = base or config.get("base_model_name_or_path")
    if not base:
        raise UserError(f"--base: {folder} does not say which model the adapter is of; name it")
    check_folder_or_hub_id("--base", base)
    check_writable(output, str(output), "--output")
    if output.exists() and is_filled(output):
        raise UserError(f"--output: {output} already holds something; name another folder")
    if nf4:
        from conveyor.models.quantized import check_quantization

        check_quantization("--nf4")
    model, tokenizer = _merged(folder, base, scalar=config.get("task_type") == "SEQ_CLS", nf4=nf4)
    with complete_or_absent(output) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def adapter_folder(path: Path) -> Path:
    """The folder itself, or adapter/ in the one of a run.

    Raises:
        UserError: neither holds an adapter.
    """
    for folder in (path, path / "adapter"):
        if all((folder / name).is_file() for name in ADAPTER_FILES):
            return folder
    raise UserError(f"{path}: neither an adapter ({', '.join(ADAPTER_FILES)}) nor the folder of a run that trained one")


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / ADAPTER_FILES[0]).read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise UserError(f"{folder / ADAPTER_FILES[0]}: not a peft configuration") from None


def _merged(folder: Path, base: str, scalar: bool, nf4: bool) -> tuple[Any, Any]:
    """Model and tokenizer."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from conveyor.models.quantized import round_weights

    auto: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    try:
        model = auto.from_pretrained(base, dtype="auto", **({"num_labels": 1} if scalar else {}))
        tokenizer = AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise UserError(f"--base: {base}: cannot be loaded as a model: {str(error).strip().splitlines()[0]}") from error
    if nf4:
        round_weights(model)
    try:
        return PeftModel.from_pretrained(model, str(folder)).merge_and_unload(), tokenizer
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}: does not fit {base}: {reason[:200]}") from error
