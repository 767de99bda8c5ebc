"""What a decoder model is: the numbers of its config.json, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm.rope import RopeConfig, cos_sin_table, positive
from minivllm.shown import shown

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_MAX_INT32 = 2**31 - 1

# What transformers assumes where config.json is silent.
_DEFAULT_MAX_POSITION = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131072,
    "Qwen2ForCausalLM": 32768,
    "Qwen3ForCausalLM": 32768,
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family; every number has been checked.

    Attributes
    ----------
    architecture
        One of ``ARCHITECTURES``.
    num_q_heads, num_kv_heads, head_dim
        ``num_q_heads`` is a multiple of ``num_kv_heads``; ``num_q_heads * head_dim`` may differ from
        ``hidden_size``.
    max_position_embeddings
        As the file states it, in tokens; `max_seq_len` is the limit that follows from it.
    qkv_bias, o_bias, qk_norm
        Whether the q, k, v and the output projections have biases, and queries and keys are normed.
    sliding_window
        Tokens a query sees where layers are limited to a window, else None.
    dtype
        Of the weights in the file: float32, bfloat16 or float16.
    eos_token_ids, bos_token_id
        All end ids that generation_config.json lists (config.json's, where it lists none); None for no
        begin-of-text id.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    dtype: torch.dtype = torch.float32
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_q_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even")

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, in tokens, that the model serves.

        The stretched length for yarn and linear scaling. Where layers see only a window, the window: up to
        there it makes no difference, and windows themselves are not implemented.
        """
        limit = self.max_position_embeddings
        if self.rope.rope_type == "yarn":
            limit = max(limit, int(min(self.rope.original_max_position * self.rope.factor, _MAX_INT32)))
        elif self.rope.rope_type == "linear":
            limit = int(min(limit * self.rope.factor, _MAX_INT32))
        return limit if self.sliding_window is None else min(limit, self.sliding_window)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, a tied embedding counted once."""
        q_rows, kv_rows = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q_rows + 2 * kv_rows + 3 * self.intermediate_size + 2)
        layer += (q_rows + 2 * kv_rows) * self.qkv_bias + self.hidden_size * self.o_bias
        layer += 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes the weights take in `dtype` (the file's own by default)."""
        return self.num_parameters * (dtype or self.dtype).itemsize

    def kv_bytes_per_token(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of keys and values that one token takes, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * (dtype or self.dtype).itemsize

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read config.json and generation_config.json of a model directory, or the metadata of a .gguf file.

        Raises
        ------
        FileNotFoundError
            When there is no config.json.
        ValueError
            On an architecture, a feature or a number that is not served; the message names field and file.
        """
        path = Path(path)
        if path.suffix == ".gguf" and not path.is_dir():
            from minivllm.gguf import GGUFFile

            return GGUFFile(path).config()
        file = path / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{path} holds no config.json, so it is not a model directory")
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else None
        return cls.from_dict(read_json(file), generation, source=str(file))

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        source: str = "config.json",
    ) -> ModelConfig:
        """Build from the contents of config.json and, where there is one, generation_config.json.

        Of the latter only the end and begin ids are used: how to sample is the caller's to say.
        """
        architecture = _architecture(config, source)
        quantization = config.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise ValueError(f"{source}: weights quantised with {method!r} are not served")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"{source}: hidden_act {activation!r} is not served, only 'silu'")
        if config.get("mlp_bias"):
            raise ValueError(f"{source}: mlp_bias is not served")

        def whole(name: str, default: int | None = None) -> int:
            value = config.get(name)
            value = default if value is None else value
            if value is None:
                raise ValueError(f"{source}: {name} is missing")
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INT32:
                raise ValueError(f"{source}: {name} must be a whole number from 1 to {_MAX_INT32}, not {shown(value)}")
            return value

        hidden, q_heads = whole("hidden_size"), whole("num_attention_heads")
        if config.get("head_dim") is None and architecture != "Qwen3ForCausalLM" and hidden % q_heads:
            raise ValueError(
                f"{source}: hidden_size ({hidden}) is not a multiple of num_attention_heads ({q_heads}), "
                "and there is no head_dim"
            )
        qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        attention_bias = bool(config.get("attention_bias")) and architecture in (
            "LlamaForCausalLM",
            "Qwen3ForCausalLM",
        )
        generation = generation or {}
        eos = _token_ids(generation.get("eos_token_id"), "generation_config.json: eos_token_id")
        bos = config.get("bos_token_id")
        bos_ids = _token_ids(generation.get("bos_token_id") if bos is None else bos, f"{source}: bos_token_id")
        try:
            return cls(
                architecture=architecture,
                vocab_size=whole("vocab_size"),
                hidden_size=hidden,
                intermediate_size=whole("intermediate_size"),
                num_layers=whole("num_hidden_layers"),
                num_q_heads=q_heads,
                num_kv_heads=whole("num_key_value_heads", q_heads),
                head_dim=whole("head_dim", 128 if qwen3 else hidden // q_heads),
                rms_norm_eps=positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", source),
                rope=RopeConfig.from_dict(config, source),
                max_position_embeddings=whole("max_position_embeddings", _DEFAULT_MAX_POSITION[architecture]),
                tie_word_embeddings=_flag(config, "tie_word_embeddings", source),
                qkv_bias=qwen2 or attention_bias,
                o_bias=attention_bias,
                qk_norm=qwen3,
                sliding_window=_sliding_window(config, architecture, whole),
                dtype=_dtype(config, source),
                eos_token_ids=eos or _token_ids(config.get("eos_token_id"), f"{source}: eos_token_id"),
                bos_token_id=bos_ids[0] if bos_ids else None,
            )
        except ValueError as error:
            text = str(error)
            raise ValueError(text if source in text else f"{source}: {text}") from None


def rope_cos_sin(config: ModelConfig, max_position: int) -> torch.Tensor:
    """Compute the model's rotary table: float32 ``[max_position, head_dim]``, cosines then sines in a row."""
    return cos_sin_table(config.rope, config.head_dim, max_position)


def resolve_dtype(config: ModelConfig, dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that weights and activations have.

    ``"auto"`` keeps the file's, except that float32 becomes bfloat16 on a GPU, and float16 float32 on a CPU.
    """
    if isinstance(dtype, str):
        if dtype == "auto":
            if device.type == "cpu":
                return torch.float32 if config.dtype == torch.float16 else config.dtype
            return torch.bfloat16 if config.dtype == torch.float32 else config.dtype
        dtype = DTYPES.get(dtype.removeprefix("torch."), dtype)
    if dtype not in DTYPES.values() or isinstance(dtype, str):
        raise ValueError(f"dtype must be 'auto' or one of {', '.join(DTYPES)}, not {dtype!r}")
    return dtype


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object, or raise a ValueError that names the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def _architecture(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        names = [names]
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names)) or f"model_type {config.get('model_type')!r}, no architectures"
    raise ValueError(f"{source}: {found} is not served; served are {', '.join(ARCHITECTURES)}")


def _flag(config: Mapping[str, Any], name: str, source: str) -> bool:
    value = config.get(name)
    if value not in (None, True, False):
        raise ValueError(f"{source}: {name} must be true or false, not {value!r}")
    return bool(value)


def _dtype(config: Mapping[str, Any], source: str) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"{source}: torch_dtype {name!r} is not served, only {', '.join(DTYPES)}")
    return dtype


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Return one id, a list of ids or nothing as a tuple without repeats."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ValueError(f"{name} must be a token id or a list of them, not {value!r}")
    return tuple(dict.fromkeys(ids))


def _sliding_window(config: Mapping[str, Any], architecture: str, whole: Any) -> int | None:
    if architecture == "MistralForCausalLM":
        # All layers, and 4096 where the file is silent.
        return None if config.get("sliding_window", 4096) is None else whole("sliding_window", 4096)
    if architecture == "LlamaForCausalLM" or config.get("sliding_window") is None:
        return None
    window: int = whole("sliding_window")
    if not config.get("use_sliding_window"):
        return None
    layer_types = config.get("layer_types")
    if layer_types is not None:
        return window if "sliding_attention" in layer_types else None
    return None if config.get("max_window_layers", 28) >= whole("num_hidden_layers") else window
