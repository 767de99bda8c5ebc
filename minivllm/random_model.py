"""Model directories with random weights, for measuring: the time does not depend on what the weights are."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minivllm.config import ModelConfig
from minivllm.loader import expected_tensors

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    },
}


def cache_folder() -> Path:
    """Return where models are kept."""
    return Path(os.environ.get("MINIVLLM_CACHE") or "~/.cache/minivllm").expanduser()


def random_model(name: str, directory: Path | None = None, seed: int = 0) -> Path:
    """Make a model of a known shape with random bfloat16 weights, or return the one that is there.

    Weights are normal with a deviation of 0.02, as fresh models have; norms are ones. They are drawn on the card where
    there is one, so those of a card and of a CPU differ.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; there are {', '.join(SHAPES)}")
    out = directory or cache_folder() / f"random-{name}"
    if (out / "config.json").is_file():
        return out
    config = ModelConfig.from_dict(SHAPES[name])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for tensor_name, target in expected_tensors(config).items():
        if len(target.shape) == 1:
            tensors[tensor_name] = torch.ones(target.shape, dtype=torch.bfloat16)
        else:
            drawn = torch.empty(target.shape, dtype=torch.bfloat16, device=device)
            tensors[tensor_name] = drawn.normal_(0.0, 0.02, generator=generator).cpu()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n", encoding="utf-8")
        temporary.rename(out)
    except OSError:
        if not (out / "config.json").is_file():  # else another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def model_path(model: str) -> str:
    """Return the directory that ``random:NAME`` stands for; anything else is returned as it is."""
    return str(random_model(model.removeprefix("random:"))) if model.startswith("random:") else model
