"""A .gguf file as a model: its metadata to a config and a tokenizer, its weights dequantised while loading.

The quantised types themselves are decoded by the `gguf` package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.gguf_header import GGUFTensor, read_gguf_header
from minivllm.rope import RopeConfig

if TYPE_CHECKING:
    from minivllm.tokenizer import Tokenizer

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Elements dequantised at once, so that the float32 copy of a large embedding never stands there whole.
_ELEMENTS_AT_ONCE = 1 << 23

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """The header of a .gguf file, and what a model needs of the rest.

    Parameters
    ----------
    path
        Of the file.

    Raises
    ------
    ValueError
        When it is not a GGUF file of version 2 or 3, or is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata, self.tensors = read_gguf_header(self.path)

    @property
    def architecture(self) -> str:
        """The architecture as GGUF names it; Mistral goes by ``"llama"``."""
        return str(self.metadata.get("general.architecture"))

    def config(self) -> ModelConfig:
        """Build the model's config from the metadata and the tensors' shapes.

        Raises
        ------
        ValueError
            On an architecture or a number that is not served.
        """
        config = ModelConfig.from_dict(self.config_dict(), self.generation_dict(), source=str(self.path))
        factors = self._unknown_factors(config.rope.theta)
        if factors is None:
            return config
        return replace(config, rope=replace(config.rope, freq_factors=tuple(factors.tolist())))

    def config_dict(self) -> dict[str, Any]:
        """Return the contents of an equivalent config.json.

        Rope factors stored as a tensor become the Llama-3 scaling that they were computed from; those that
        were not are left to `config`, which can hold them as they are.
        """
        arch = self.architecture
        if arch not in _ARCHITECTURES:
            served = ", ".join(_ARCHITECTURES)
            raise ValueError(f"{self.path}: GGUF architecture {arch!r} is not served; served are {served}")
        if self.metadata.get(f"{arch}.expert_count", 0):
            raise ValueError(f"{self.path}: mixtures of experts are not served")

        def value(name: str, default: Any = None) -> Any:
            return self.metadata.get(f"{arch}.{name}", default)

        heads, hidden = value("attention.head_count"), value("embedding_length")
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{self.path}: token_embd.weight is missing")
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[arch]],
            "model_type": arch,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": value("feed_forward_length"),
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": value("attention.head_count_kv", heads),
            "hidden_act": "silu",
            "rms_norm_eps": _short(value("attention.layer_norm_rms_epsilon", 1e-6)),
            "max_position_embeddings": value("context_length"),
            "rope_theta": _short(value("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in self.tensors,
            "torch_dtype": "bfloat16",
        }
        head_dim = value("attention.key_length", value("rope.dimension_count"))
        if head_dim is not None:
            config["head_dim"] = head_dim
        bos = self.metadata.get("tokenizer.ggml.bos_token_id")
        if bos is not None:
            config["bos_token_id"] = bos
        scaling = self._rope_scaling(value, config)
        if scaling is not None:
            config["rope_scaling"] = scaling
        return config

    def _rope_scaling(self, value: Callable[..., Any], config: dict[str, Any]) -> dict[str, Any] | None:
        factors = self.tensors.get("rope_freqs.weight")
        if factors is not None:
            return _llama3_scaling(self.read(factors).double(), config["rope_theta"])
        kind = value("rope.scaling.type", "none")
        factor = value("rope.scaling.factor", value("rope.scale_linear"))
        if kind == "none" and factor in (None, 0.0, 1.0):
            return None
        scaling = {"rope_type": "linear" if kind == "none" else kind, "factor": factor}
        original = value("rope.scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _unknown_factors(self, theta: float) -> Tensor | None:
        stored = self.tensors.get("rope_freqs.weight")
        factors = None if stored is None else self.read(stored).double()
        return factors if factors is None or _llama3_scaling(factors, theta) is None else None

    def check_convertible(self) -> None:
        """Raise a ValueError where no config.json could say what the file does."""
        if self._unknown_factors(self.config().rope.theta) is not None:
            raise ValueError(f"{self.path}: rope_freqs.weight holds factors that config.json has no words for")

    def generation_dict(self) -> dict[str, Any]:
        """Return the contents of an equivalent generation_config.json: all end ids."""
        from minivllm.gguf_tokenizer import end_ids

        generation: dict[str, Any] = {}
        ends = end_ids(self.metadata)
        if ends:
            generation["eos_token_id"] = ends
        bos = self.metadata.get("tokenizer.ggml.bos_token_id")
        if bos is not None:
            generation["bos_token_id"] = bos
        return generation

    def tokenizer(self) -> Tokenizer | None:
        """Build the tokenizer that the metadata describes; None where there is none."""
        from minivllm.gguf_tokenizer import build_tokenizer

        try:
            return build_tokenizer(self.metadata, str(self.path))
        except ValueError:
            raise
        except Exception as error:  # The library raises plain Exception.
            raise ValueError(f"{self.path}: its tokenizer is damaged: {error}") from None

    def pieces(self, tensor: GGUFTensor) -> Iterator[tuple[int, Tensor]]:
        """Dequantise a tensor: pairs of a first row and float32 rows from there on.

        Raises
        ------
        ImportError
            When the `gguf` package is not installed.
        ValueError
            When the type is not known to it, or the file is cut off.
        """
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise ImportError("reading .gguf files needs the gguf package: pip install 'minivllm[gguf]'") from error
        try:
            kind = GGMLQuantizationType(tensor.type_id)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ValueError(f"{self.path}: {tensor.name} has the unknown type {tensor.type_id}") from None
        columns = tensor.shape[-1]
        if columns % block:
            raise ValueError(f"{self.path}: a row of {tensor.name} is no whole number of {kind.name} blocks")
        rows, row_bytes = math.prod(tensor.shape[:-1]), columns // block * block_bytes
        if self.path.stat().st_size < tensor.offset + rows * row_bytes:
            raise ValueError(f"{self.path} is cut off: {tensor.name} ends after it")
        at_once = max(_ELEMENTS_AT_ONCE // columns, 1)
        for start in range(0, rows, at_once):
            count = min(at_once, rows - start)
            raw = np.fromfile(self.path, np.uint8, count * row_bytes, offset=tensor.offset + start * row_bytes).reshape(
                count, row_bytes
            )
            try:
                values = dequantize(raw, kind)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path}: {tensor.name} has type {kind.name}, which the gguf package cannot decode"
                ) from None
            flat = np.ascontiguousarray(values, dtype=np.float32)
            yield start, torch.from_numpy(flat).view(count, columns)

    def read(self, tensor: GGUFTensor) -> Tensor:
        """Dequantise a small tensor whole, to float32."""
        return torch.cat([rows for _, rows in self.pieces(tensor)]).view(tensor.shape)

    def load_weights(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: bool = False
    ) -> dict[str, Tensor]:
        """Dequantise all weights, to the names and shapes of `minivllm.loader.load_weights`."""
        from tqdm import tqdm

        from minivllm.loader import allocate, expected_tensors

        targets = expected_tensors(config)
        ours = {hf_name(name): tensor for name, tensor in self.tensors.items() if name != "rope_freqs.weight"}
        missing = [name for name in targets if name not in ours]
        extra = [tensor.name for name, tensor in ours.items() if name not in targets]
        if missing or extra:
            lists = f"missing {missing[:3] or 'nothing'}, unexpected {extra[:3] or 'nothing'}"
            raise ValueError(f"{self.path}: {lists}")
        weights = allocate(config, device, dtype)
        for name, target in tqdm(targets.items(), desc="Loading weights", disable=not progress):
            tensor = ours[name]
            if tensor.shape != target.shape:
                raise ValueError(
                    f"{self.path}: {tensor.name} has shape {list(tensor.shape)}, "
                    f"the metadata asks for {list(target.shape)}"
                )
            into = weights[target.name][target.start : target.start + target.shape[0]]
            order = self._row_order(name, target.shape[0], config)
            width = target.shape[-1] if len(target.shape) == 2 else 1
            for start, rows in self.pieces(tensor):
                rows = rows.view(-1, width) if len(target.shape) == 2 else rows.view(-1)
                if order is None:
                    into[start : start + len(rows)].copy_(rows)
                else:
                    into[order[start : start + len(rows)].to(device)] = rows.to(device, dtype)
        return weights

    def _row_order(self, name: str, num_rows: int, config: ModelConfig) -> Tensor | None:
        """Say where each stored row of q and k belongs; None where they lie as they should.

        For the llama architecture the two halves of a head's rows are stored interleaved, because that
        runtime rotates neighbours, where ours rotates dimensions half a head apart.
        """
        if self.architecture != "llama" or not (".q_proj." in name or ".k_proj." in name):
            return None
        half = config.head_dim // 2
        return torch.arange(num_rows).view(-1, 2, half).transpose(1, 2).reshape(-1)


def hf_name(name: str) -> str:
    """Return a GGUF tensor's name as Hugging Face checkpoints have it; unchanged where there is none."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _NAMES:
        return f"{_NAMES[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return name


def _short(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-5, not 9.999999747e-06."""
    return float(str(np.float32(value)))


def _llama3_scaling(factors: Tensor, theta: float) -> dict[str, Any] | None:
    """Find the Llama-3 scaling that gives these divisors of the inverse frequencies; None where none does."""
    scaling = {
        "rope_type": "llama3",
        "factor": max(_short(float(factors.max())), 1.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    head_dim = 2 * len(factors)
    plain = RopeConfig(theta=theta).inv_freq(head_dim)
    ours = RopeConfig.from_dict({"rope_theta": theta, "rope_scaling": scaling}).inv_freq(head_dim)
    return scaling if torch.allclose(plain / ours, factors, rtol=1e-4, atol=0) else None
