"""A request on disk: tokens, parameters, sampler state and KV in one .safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.fingerprint import fingerprint
from minivllm.intake import RequestMaker
from minivllm.loader import stored_tensors
from minivllm.request import Logprob, Logprobs, SamplingParams
from minivllm.sequence import Request, Sequence
from minivllm.shown import shown
from minivllm.whole_file import written_whole

_FORMAT = "minivllm-request-2"
_MAX_SAMPLE = 2**31 - 1 - 2**20  # an int32 on the device, with room for further branches


def _pack_logprobs(logprobs: Logprobs | None) -> Any:
    if logprobs is None:
        return None
    return [None if p is None else [[i, x.logprob, x.rank, x.decoded_token] for i, x in p.items()] for p in logprobs]


def _unpack_logprobs(data: Any) -> Logprobs | None:
    if data is None:
        return None
    return [None if p is None else dict(_unpack(*x) for x in p) for p in data]


def _unpack(token: int, logprob: float, rank: int, text: str | None) -> tuple[int, Logprob]:
    if not (isinstance(token, int) and isinstance(rank, int) and isinstance(text, str | None)):
        raise TypeError("a log probability that is none")
    return token, Logprob(float(logprob), rank, text)


class ModelFiles:
    """Remember a model's files as they are when an engine reads them, wherever the process goes afterwards."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._seen = self._look()

    def _look(self) -> list[tuple[Path, int, int]]:
        single = self._path.is_file()
        files = {self._path} if single else {tensor.file for tensor in stored_tensors(self._path).values()}
        found = [(file, file.stat()) for file in sorted(files)]
        return [(file, stat.st_size, stat.st_mtime_ns) for file, stat in found]

    def fingerprint(self, config: ModelConfig) -> str:
        """Return the model's fingerprint; ValueError where files are not those that were read, so another model's."""
        if self._look() != self._seen:
            raise ValueError(f"the model's files in {self._path} have changed since this engine read them")
        return fingerprint(self._path, config)


def origin(files: ModelFiles | None, config: ModelConfig, dtype: torch.dtype) -> dict[str, str]:
    """Return what an engine must have in common with the one that saved a request; ``files`` are those of its model.

    Tokens and KV of another model would be taken for its own, and those of another dtype go on otherwise than here.
    """
    model = "" if files is None else files.fingerprint(config)
    return {"model": model, "dtype": str(dtype).removeprefix("torch.")}


def save(request: Request, path: Path, kv: Tensor | None, own: dict[str, str]) -> None:
    """Write a request that has not ended; ``kv`` is [layers, 2, kv heads, tokens, head_dim] or None for none yet.

    ``own`` is the engine's `origin`. The file appears whole or not at all.
    """
    sequence = request.sequences[0]
    if request.params.n > 1:
        raise ValueError(f"request {request.ordinal} has n = {request.params.n} samples; save takes requests with one")
    if request.params.logits_fn is not None:
        raise ValueError(f"request {request.ordinal} has a logits_fn, which a file cannot hold")
    if sequence.state == "ended":
        raise ValueError(f"request {request.ordinal} has ended: read its result instead")
    state = {
        "prompt": request.prompt,
        "params": request.params.to_dict(),
        "seed": request.seed,
        "sample": sequence.sample,
        "prompt_tokens": sequence.prompt_len,
        "logprobs": _pack_logprobs(sequence.logprobs),
        "prompt_logprobs": _pack_logprobs(request.prompt_logprobs),
    }
    tensors = {"tokens": torch.tensor(sequence.tokens, dtype=torch.int32)}
    if kv is not None:
        tensors["kv"] = kv
    if path.is_dir() or not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: it is a directory, or is to be in one that does not exist")
    try:
        with written_whole(path) as partial:
            save_file(tensors, partial, metadata={"format": _FORMAT, **own, "request": json.dumps(state)})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _whole(state: dict[str, Any], name: str, low: int, high: int) -> int:
    value = state[name]
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)}")
    return value


def _restore(make: RequestMaker, state: dict[str, Any], tokens: list[int]) -> Request:
    """Return the request that a file tells of; whatever cannot be raises, before any other request could notice."""
    prompt_len = _whole(state, "prompt_tokens", 1, len(tokens))
    request = make(tokens[:prompt_len], SamplingParams.from_dict(state["params"]))
    request.prompt, request.seed = state["prompt"], _whole(state, "seed", -(2**63), 2**64 - 1)
    if not (request.prompt is None or isinstance(request.prompt, str)) or request.params.n != 1:
        raise ValueError("its prompt or its n cannot be")
    logprobs = _unpack_logprobs(state["logprobs"])
    sequence = Sequence(request, _whole(state, "sample", 0, _MAX_SAMPLE), tokens, logprobs=logprobs)
    if (logprobs is None) != (request.params.logprobs is None):
        raise ValueError("its parameters and its log probabilities do not agree")
    request.prompt_logprobs = _unpack_logprobs(state["prompt_logprobs"])
    wanted = None if request.params.prompt_logprobs is None else prompt_len
    if (None if request.prompt_logprobs is None else len(request.prompt_logprobs)) != wanted:
        raise ValueError("its parameters and its prompt's log probabilities do not agree")
    request.sequences, request.num_samples = [sequence], sequence.sample + 1
    return request


def _check_origin(metadata: dict[str, str], path: Path, own: dict[str, str]) -> None:
    model, dtype = metadata.get("model", ""), metadata.get("dtype", "")
    if model != own["model"]:
        raise ValueError(
            f"{path} was saved by an engine with another model: its fingerprint is {model[:12]}…, and that of this "
            f"engine's is {own['model'][:12]}…"
        )
    if dtype != own["dtype"]:
        raise ValueError(f"{path} was saved by an engine with dtype {dtype[:12]}, and this one has {own['dtype']}")


def load(make: RequestMaker, path: Path, cache: Tensor, own: dict[str, str]) -> Request:
    """Read a request for an engine of this `origin` whose KV cache is ``cache``; ValueError where it does not fit."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a saved request: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a saved request ({_FORMAT})")
    _check_origin(metadata, path, own)
    try:
        request = _restore(make, json.loads(metadata["request"]), tensors["tokens"].tolist())
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or does not fit: {type(error).__name__}: {error}") from error
    sequence = request.sequences[0]
    tokens, logprobs = sequence.tokens, sequence.logprobs
    if len(tokens) >= request.limit:
        raise ValueError(f"{path} holds {len(tokens)} tokens, and this engine ends a request at {request.limit}")
    drawn = sequence.output
    if any(not 0 <= token < make.config.vocab_size for token in drawn):
        raise ValueError(f"{path} holds a token id outside the vocabulary of {make.config.vocab_size}")
    if logprobs is not None and len(logprobs) != len(drawn):
        raise ValueError(f"{path} is damaged: {len(logprobs)} log probabilities of {len(drawn)} tokens")
    kv = tensors.get("kv")
    if kv is not None:
        layers, _, _, heads, _, dim = cache.shape
        fits = kv.dim() == 5 and (kv.shape[:3], kv.shape[4]) == ((layers, 2, heads), dim)
        if not fits or kv.dtype != cache.dtype:
            raise ValueError(f"{path} was saved by another model: its KV is {kv.dtype} {tuple(kv.shape)}")
        if not 0 < kv.shape[3] < len(tokens):
            raise ValueError(f"{path} is damaged: KV of {kv.shape[3]} of {len(tokens)} tokens")
        if not kv.isfinite().all():  # its blocks would serve other prompts that begin alike
            raise ValueError(f"{path} is damaged: its KV holds NaN or infinity")
        sequence.saved_kv = kv
        sequence.count_prompt(kv.shape[3])  # neither computed here nor found in the prefix cache
    return request
