"""What fits: a model's memory from config.json alone."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm._extension import has_cuda
from minivllm.commands.options import format_bytes
from minivllm.config import ModelConfig, resolve_dtype
from minivllm.defaults import choose_sizes

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class Plan:
    """Hold what `minivllm plan` says; sizes in bytes, lengths in tokens.

    ``fits`` maps a length to how many sequences of it the KV cache holds at once, as far as there are slots.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    block_size: int
    block_bytes: int
    kv_cache_bytes: int
    num_blocks: int
    cache_tokens: int
    num_slots: int
    max_seq_len: int
    sequences: int
    fits: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def text(self) -> str:
        """Return it for people."""
        rows = [
            ("model", f"{self.model} ({self.architecture}, {self.parameters:,} parameters)"),
            ("device", f"{self.device}: sizes that were not given are its defaults"),
            ("weights", f"{format_bytes(self.weight_bytes)} in {self.dtype}"),
            (
                "KV cache",
                f"{format_bytes(self.kv_cache_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens",
            ),
            ("a token", f"{format_bytes(self.kv_bytes_per_token)} of KV"),
            ("a block", format_bytes(self.block_bytes)),
            ("tokens", f"{self.cache_tokens:,} at once"),
            ("slots", f"{self.num_slots}, with sequences of up to {self.max_seq_len:,} tokens"),
            ("at full length", f"{self.sequences} of {self.num_slots} slots can be in use"),
            ("together", f"{format_bytes(self.weight_bytes + self.kv_cache_bytes)}, and activations beside"),
        ]
        lines = [f"{name:<15} {value}" for name, value in rows]
        lines += ["", "length           sequences at once"]
        lines += [f"{length:>7,} tokens   {count}" for length, count in self.fits.items()]
        if self.sequences == 0:
            need = -(-(self.max_seq_len - 1) // self.block_size) * self.block_bytes
            lines += [
                "",
                f"One sequence of {self.max_seq_len:,} tokens takes {format_bytes(need)}: raise --kv-cache-bytes",
            ]
            lines[-1] += " or lower --max-seq-len."
        return "\n".join(lines)


def make_plan(
    model: str,
    kv_cache_bytes: int,
    *,
    max_seq_len: int | None = None,
    num_slots: int | None = None,
    block_size: int | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> Plan:
    """Compute what fits.

    Parameters
    ----------
    model
        A model directory, its config.json, a .gguf file, or a hub id, of which config.json alone is downloaded.
    device
        "cpu" or "cuda", whose defaults are taken; by default where an engine would run here.

    Raises
    ------
    FileNotFoundError, ValueError
        There is no such model, it is not served, or a number is out of range.
    """
    config = read_config(model)
    place = torch.device(device or _device_here())
    chosen = resolve_dtype(config, dtype, place)
    sizes = choose_sizes(
        config,
        place,
        chosen,
        num_slots=num_slots,
        block_size=block_size,
        num_blocks=None,
        kv_cache_bytes=kv_cache_bytes,
        max_seq_len=max_seq_len,
        max_step_tokens=None,
    )

    def sequences(length: int) -> int:
        blocks = -(-max(length - 1, 1) // sizes.block_size)  # the last token's KV is never needed
        return min(sizes.num_blocks // blocks, sizes.num_slots)

    lengths = [length for length in _LENGTHS if length < sizes.max_seq_len] + [sizes.max_seq_len]
    token = config.kv_bytes_per_token(chosen)
    return Plan(
        model=model,
        architecture=config.architecture,
        device=place.type,
        dtype=str(chosen).removeprefix("torch."),
        parameters=config.num_parameters,
        weight_bytes=config.weight_bytes(chosen),
        kv_bytes_per_token=token,
        block_size=sizes.block_size,
        block_bytes=token * sizes.block_size,
        kv_cache_bytes=kv_cache_bytes,
        num_blocks=sizes.num_blocks,
        cache_tokens=sizes.num_blocks * sizes.block_size,
        num_slots=sizes.num_slots,
        max_seq_len=sizes.max_seq_len,
        sequences=sequences(sizes.max_seq_len),
        fits={length: sequences(length) for length in lengths},
    )


def _device_here() -> str:
    """Return where an engine would run; a plan needs no kernels, so they may not have been compiled."""
    try:
        return "cuda" if has_cuda() else "cpu"
    except ImportError:
        return "cuda" if torch.cuda.is_available() else "cpu"


def read_config(model: str) -> ModelConfig:
    """Read a model's config from wherever it is; nothing else is downloaded."""
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return ModelConfig.from_dir(path.parent) if path.name == "config.json" else _from_file(path)
    if path.exists():
        return ModelConfig.from_dir(path)
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no model at {model!r}")
    from huggingface_hub import hf_hub_download

    try:
        with tempfile.TemporaryDirectory() as folder:
            hf_hub_download(model, "config.json", local_dir=folder)
            return ModelConfig.from_dir(folder)
    except ValueError:
        raise
    except Exception as error:  # The hub's client raises what its HTTP library does, which varies.
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise FileNotFoundError(f"{model!r} is neither a path nor a model that the hub would give: {reason}") from error


def _from_file(path: Path) -> ModelConfig:
    from minivllm.config import read_json

    return ModelConfig.from_dict(read_json(path), source=str(path))
