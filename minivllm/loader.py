"""Weights from files to the tensors of a `Model`: names, shapes and dtypes checked, fused in place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minivllm.config import ModelConfig, read_json, resolve_dtype
from minivllm.safetensors_file import StoredTensor, read_header, refuse_lfs_pointer
from minivllm.shown import shown
from minivllm.transfer import FileReader

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_PATTERNS = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]

# Buffers that old checkpoints carry beside the weights; they follow from the config.
_HARMLESS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Target:
    """Where a stored tensor goes: rows `start` to `start + shape[0]` of our tensor `name`."""

    name: str
    start: int
    shape: tuple[int, ...]


class _Progress(Protocol):
    def update(self, n: int, /) -> object: ...


def resolve_model(model: str | Path) -> Path:
    """Find a model's files: a directory, a .gguf file, or a hub id, downloaded where not cached.

    Raises
    ------
    FileNotFoundError
        When there is no such path and no such model on the hub, or the hub cannot be reached.
    ValueError
        When the path is a file of another kind.
    """
    path = Path(model).expanduser()
    try:
        found, is_file = path.is_dir() and model != "", path.is_file()
    except OSError as error:  # a name that is too long
        raise FileNotFoundError(f"there is no model at {shown(str(model))}: {error.strerror}") from None
    if found:
        return path
    if is_file:
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file; a model is a directory, a .gguf file or a hub id")
        return path
    if not isinstance(model, str) or not _HUB_ID.fullmatch(model) or path.suffix == ".gguf":
        raise FileNotFoundError(f"there is no model at {str(model)!r}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # The hub's client raises what its HTTP library does, which varies.
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise FileNotFoundError(
            f"{model!r} is neither a local path nor a model that the hub would give: {reason}"
        ) from error


def load_weights(
    path: str | Path,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    progress: bool = False,
) -> dict[str, Tensor]:
    """Read a model's weights.

    Parameters
    ----------
    path
        A directory with safetensors files, or a .gguf file.
    config
        Says which tensors must be there, and their shapes.
    device, dtype
        Where the tensors are to be and what they are converted to; ``"auto"`` as `resolve_dtype` says.
    progress
        Whether to show a bar.

    Returns
    -------
    dict[str, Tensor]
        ``embed`` and ``lm_head`` (absent if tied) ``[vocab_size, hidden_size]``, ``norm``
        ``[hidden_size]``, and for layer i, each after ``layers.{i}.``: ``input_norm`` and ``post_norm``
        ``[hidden_size]``, ``qkv`` ``[(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]`` (rows of
        q, then k, then v), ``o`` ``[hidden_size, num_q_heads * head_dim]``, ``gate_up``
        ``[2 * intermediate_size, hidden_size]`` (gate, then up), ``down``
        ``[hidden_size, intermediate_size]``; where the config has them ``qkv_bias``, ``o_bias``, and
        ``q_norm``, ``k_norm`` ``[head_dim]``.

    Raises
    ------
    FileNotFoundError
        When weight files are absent.
    ValueError
        When a tensor is missing, unexpected, of another shape or dtype, or a file is damaged; it names
        the file.
    """
    path, device = Path(path), torch.device(device)
    dtype = resolve_dtype(config, dtype, device)
    if path.suffix == ".gguf" and not path.is_dir():
        from minivllm.gguf import GGUFFile

        return GGUFFile(path).load_weights(config, device, dtype, progress)
    stored = stored_tensors(path)
    if config.num_layers > len(stored):  # a config that is wrong by far: its tensors are not even to be named
        raise ValueError(f"{path}: {len(stored)} tensors cannot be num_hidden_layers = {config.num_layers} layers")
    targets = expected_tensors(config)
    check_stored(stored, targets, config, path)
    weights = allocate(config, device, dtype)
    total = sum(stored[name].num_bytes for name in targets)
    with ExitStack() as stack:
        bar: _Progress | None = None
        if progress:
            from tqdm import tqdm

            bar = stack.enter_context(tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights"))
        reader = stack.enter_context(FileReader(device))
        # In the order of the files: reading ahead works, and spinning disks need not seek.
        for name in sorted(targets, key=lambda name: (stored[name].file, stored[name].offset)):
            tensor, target = stored[name], targets[name]
            into = weights[target.name][target.start : target.start + target.shape[0]]
            reader.read(tensor, into)
            if bar is not None:
                bar.update(tensor.num_bytes)
    return weights


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of our tensors, by its name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in expected_tensors(config).values():
        rows = target.start + target.shape[0]
        if target.name not in shapes or shapes[target.name][0] < rows:
            shapes[target.name] = (rows, *target.shape[1:])
    return shapes


def allocate(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Allocate our tensors, uninitialised."""
    shapes = weight_shapes(config)
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}


def expected_tensors(config: ModelConfig) -> dict[str, Target]:
    """Return every tensor that the model's files must hold, by its name there."""
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_q_heads * dim, config.num_kv_heads * dim
    vocab = (config.vocab_size, hidden)
    targets = {
        "model.embed_tokens.weight": Target("embed", 0, vocab),
        "model.norm.weight": Target("norm", 0, (hidden,)),
    }
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = Target("lm_head", 0, vocab)
    qkv = (("q", 0, q_rows), ("k", q_rows, kv_rows), ("v", q_rows + kv_rows, kv_rows))
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        targets[f"{theirs}.input_layernorm.weight"] = Target(f"{ours}.input_norm", 0, (hidden,))
        for letter, start, rows in qkv:
            name = f"{theirs}.self_attn.{letter}_proj"
            targets[f"{name}.weight"] = Target(f"{ours}.qkv", start, (rows, hidden))
            if config.qkv_bias:
                targets[f"{name}.bias"] = Target(f"{ours}.qkv_bias", start, (rows,))
        targets[f"{theirs}.self_attn.o_proj.weight"] = Target(f"{ours}.o", 0, (hidden, q_rows))
        if config.o_bias:
            targets[f"{theirs}.self_attn.o_proj.bias"] = Target(f"{ours}.o_bias", 0, (hidden,))
        if config.qk_norm:
            targets[f"{theirs}.self_attn.q_norm.weight"] = Target(f"{ours}.q_norm", 0, (dim,))
            targets[f"{theirs}.self_attn.k_norm.weight"] = Target(f"{ours}.k_norm", 0, (dim,))
        targets[f"{theirs}.post_attention_layernorm.weight"] = Target(f"{ours}.post_norm", 0, (hidden,))
        targets[f"{theirs}.mlp.gate_proj.weight"] = Target(f"{ours}.gate_up", 0, (inter, hidden))
        targets[f"{theirs}.mlp.up_proj.weight"] = Target(f"{ours}.gate_up", inter, (inter, hidden))
        targets[f"{theirs}.mlp.down_proj.weight"] = Target(f"{ours}.down", 0, (hidden, inter))
    return targets


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a directory's model.safetensors, or of the shards that its index names."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        stored = read_header(single)
        if not stored:
            raise ValueError(f"{single} holds no tensors")
        return stored
    if not index.is_file():
        others = sorted(p.name for p in path.glob("*") if p.suffix in (".safetensors", ".bin", ".pth", ".pt"))
        hint = f"; it holds {', '.join(others[:3])}, which are not read" if others else ""
        raise FileNotFoundError(f"{path} holds neither {single.name} nor {index.name}{hint}")
    with index.open("rb") as stream:
        refuse_lfs_pointer(index, stream.read(64))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    stored = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        file = path / shard
        if Path(shard).name != shard:
            raise ValueError(f"{index} names {shard!r}, which is not a file name")
        if not file.is_file():
            raise FileNotFoundError(f"{index} names {shard}, which is not there")
        for name, tensor in read_header(file).items():
            if name in stored:
                raise ValueError(f"{name} is both in {stored[name].file} and in {file}")
            stored[name] = tensor
    for name, shard in weight_map.items():
        if name not in stored or stored[name].file.name != shard:
            raise ValueError(f"{index} says that {name} is in {shard}, which does not hold it")
    return stored


def check_stored(
    stored: Mapping[str, StoredTensor], targets: Mapping[str, Target], config: ModelConfig, path: Path
) -> None:
    """Raise a ValueError unless exactly the expected tensors are there, with the expected shapes."""
    for name, tensor in stored.items():
        if name in targets:
            shape = targets[name].shape
            if tensor.shape != shape:
                raise ValueError(
                    f"{tensor.file}: {name} has shape {list(tensor.shape)}, the config asks for {list(shape)}"
                )
            _ = tensor.dtype  # Raises where it is not served.
    missing = [name for name in targets if name not in stored]
    if missing == ["lm_head.weight"]:
        raise ValueError(
            f"{path}: lm_head.weight is missing and tie_word_embeddings is false in the config; "
            "set it to true if the output layer shares the embedding"
        )
    if missing:
        raise ValueError(f"{path}: missing {_some(missing)}")
    spare = "lm_head.weight" if config.tie_word_embeddings else None
    extra = [name for name in stored if name not in targets and name != spare and not _HARMLESS.fullmatch(name)]
    if extra:
        raise ValueError(f"{stored[extra[0]].file}: unexpected {_some(extra)}")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
