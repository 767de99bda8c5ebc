"""A .gguf file turned once into a directory in the Hugging Face layout."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minivllm.config import DTYPES, ModelConfig
from minivllm.gguf import GGUFFile
from minivllm.loader import expected_tensors


def convert_gguf(gguf_path: str | Path, out_dir: str | Path, dtype: str = "bfloat16") -> Path:
    """Dequantise a .gguf file to config.json, model.safetensors, tokenizer files and generation_config.json.

    The directory appears whole or not at all, also when several processes convert at once.

    Parameters
    ----------
    gguf_path
        The file to read.
    out_dir
        The directory to make. One that is there already is left as it is.
    dtype
        Of the weights written: ``"bfloat16"``, ``"float16"`` or ``"float32"``.

    Returns
    -------
    Path
        `out_dir`.

    Raises
    ------
    ValueError
        When the file, or the dtype, is not served.
    """
    out = Path(out_dir)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if (out / "config.json").is_file():
        return out
    source = GGUFFile(gguf_path)
    source.check_convertible()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
        made = Path(work) / out.name
        made.mkdir()
        _write(source, made, dtype)
        try:
            made.rename(out)
        except OSError:
            # Another process was faster.
            if not (out / "config.json").is_file():
                raise
    return out


def _write(source: GGUFFile, directory: Path, dtype: str) -> None:
    config = source.config()
    weights = source.load_weights(config, torch.device("cpu"), DTYPES[dtype])
    save_file(hf_tensors(weights, config), directory / "model.safetensors", metadata={"format": "pt"})
    generation = source.generation_dict()
    _write_json(directory / "generation_config.json", generation)
    config_dict = source.config_dict() | {"torch_dtype": dtype}
    if "eos_token_id" in generation:
        config_dict["eos_token_id"] = generation["eos_token_id"]
    tokenizer = source.tokenizer()
    if tokenizer is not None:
        tokenizer.save(directory)
    _write_json(directory / "config.json", config_dict)
    # The library makes files that only their owner may read.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


def hf_tensors(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return views of our tensors by the names, and in the parts, that Hugging Face checkpoints have."""
    return {
        name: weights[target.name][target.start : target.start + target.shape[0]]
        for name, target in expected_tensors(config).items()
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
