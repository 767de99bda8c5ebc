"""From what a caller passes to requests: every check that needs no device."""

from __future__ import annotations

import marshal
import numbers
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from minivllm import _extension
from minivllm.batch import Ints
from minivllm.chat_template import check_variables
from minivllm.config import ModelConfig
from minivllm.defaults import Sizes
from minivllm.request import MAX_SAMPLES, Generation, SamplingParams
from minivllm.sampler import MAX_BIAS, derive_seed
from minivllm.sequence import Request, Sequence
from minivllm.shown import shown
from minivllm.stores import ceil_div
from minivllm.tokenizer import Tokenizer

Prompts = str | Seq[str | Seq[int]] | Seq[int]
Conversations = Seq[Mapping[str, Any]] | Seq[Seq[Mapping[str, Any]]]
Params = SamplingParams | Seq[SamplingParams] | None
_CELL = np.dtype([("kind", "u1"), ("value", "<i4")])


def check_seed(seed: Any) -> int:
    """Return an engine's seed as a plain int."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed must be an int, not {shown(seed)}")
    return int(seed)


def check_flags(**flags: Any) -> None:
    """Refuse what is no bool: a text such as "no" would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, not {shown(value)}")


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device to run on: CUDA where there is one that the kernels run on, unless told otherwise."""
    _extension.check_process()
    if device is None:
        device = "cuda" if _extension.has_cuda() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'cpu' or 'cuda', not {str(device)!r}") from None
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', not {str(device)!r}")
    _extension.load()
    if place.type == "cuda":
        _extension.check_cuda(place)
        index = torch.cuda.current_device() if place.index is None else place.index
        place = torch.device("cuda", index)
    return place


def _is_ids(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta:  # what `tolist` cannot read
            return False
        return value.ndim == 1 and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return _int32s(value) is not None or all(isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in value)


def _int32s(*lists: list[Any] | tuple[Any, ...]) -> Ints | None:
    """Return lists of plain ints of 32 bits, one after the other, as an array; None where one is anything else.

    Marshal's second format lays each such int out as the letter i and four bytes, and nothing else begins with an i:
    one call in C tells ints from bools and the rest, and converts them, where a line of Python a token would keep the
    device waiting for milliseconds. A list itself is a letter and its length.
    """
    if not all(ints and type(ints[0]) is int for ints in lists):
        return None
    try:
        raws = [marshal.dumps(ints, 2) for ints in lists]
    except ValueError:  # holds what marshal does not know
        return None
    if any(len(raw) != _CELL.itemsize * (1 + len(ints)) for raw, ints in zip(raws, lists, strict=True)):
        return None
    cells = np.frombuffer(b"".join(raws), _CELL)
    plain = cells["kind"] == ord("i")
    values: Ints = cells["value"][plain]
    return values if len(values) == len(cells) - len(lists) else None


class Ids(NamedTuple):
    """Hold a prompt that is known to be good: its tokens, in a list of its own, and the same as an array."""

    tokens: list[int]
    array: Ints


def as_prompts(prompts: Prompts) -> list[Any]:
    """Return a list of prompts; one str or one list of ints is one prompt."""
    if isinstance(prompts, str) or _is_ids(prompts):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not hasattr(prompts, "__iter__"):
        raise TypeError(f"prompts must be a str, a list of ints, or a list of either, not {type(prompts).__name__}")
    if getattr(prompts, "ndim", 1) == 0:
        raise TypeError("prompts must be a str, a list of ints, or a list of either, not an array without dimensions")
    return list(prompts)


def as_conversations(conversations: Conversations) -> list[Any]:
    """Return a list of conversations; one list of messages is one conversation."""
    if isinstance(conversations, (str, bytes, Mapping)) or not hasattr(conversations, "__iter__"):
        kind = type(conversations).__name__
        raise TypeError(f"conversations must be a list of messages or a list of such lists, not {kind}")
    listed: list[Any] = list(conversations)
    if listed and all(isinstance(m, Mapping) for m in listed):
        listed = [listed]
    return listed


def render(tokenizer: Tokenizer | None, conversations: Conversations, template: Mapping[str, Any]) -> list[Any]:
    """Return each conversation's token ids, or the error that its request is to be refused with."""
    known = need_tokenizer(tokenizer, "chat")
    check_variables(template)
    prompts: list[Any] = []
    for i, messages in enumerate(as_conversations(conversations)):
        try:
            _check_conversation(messages, i)
            prompts.append(known.apply_chat_template(messages, **template))
        except (TypeError, ValueError) as error:
            prompts.append(error)
    return prompts


def _check_conversation(messages: Any, i: int) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise TypeError(f"conversation {i} must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ValueError(f"conversation {i} is empty")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"conversation {i}: a message needs a 'role' and a 'content', not {shown(message)}")


def pair(prompts: Seq[Any], params: Params) -> list[tuple[Any, SamplingParams]]:
    """Give each prompt its parameters."""
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in prompts]
    if not isinstance(params, Seq) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError("params must be a SamplingParams or a list of them")
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(params)} params: give one for all, or one a prompt")
    return list(zip(prompts, params, strict=True))


def need_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """Return the tokenizer, or say that ``what`` needs one."""
    if tokenizer is None:
        raise ValueError(f"{what} needs a tokenizer.json beside the model's weights, and there is none")
    return tokenizer


class RequestMaker:
    """Check prompts and parameters against a model and an engine's sizes, and make requests of them."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, sizes: Sizes) -> None:
        self.config, self.tokenizer, self.sizes = config, tokenizer, sizes
        self._params: object = self  # those checked last: a call has one for all, as a rule
        self._ends: frozenset[int] = frozenset()  # theirs

    def convert(self, prompts: Seq[Any]) -> Seq[Any]:
        """Return lists of token ids as `Ids`, checked and converted all at once, and other prompts as they are.

        Where one is bad no list is converted, and the calls find out which.
        """
        own = {i: list(p) for i, p in enumerate(prompts) if type(p) is list and p}
        array = _int32s(*own.values()) if own else None
        if array is None or array.view(np.uint32).max() >= self.config.vocab_size:  # a negative one is a large one
            return prompts
        converted, at = list(prompts), 0
        for i, ids in own.items():
            converted[i] = Ids(ids, array[at : at + len(ids)])
            at += len(ids)
        return converted

    def __call__(self, prompt: Any, params: SamplingParams, index: int = 0) -> Request:
        """Return the request; ValueError or TypeError says what cannot be.

        It has no number and, where its parameters name none, no seed until `number` gives them.
        """
        name = f"prompt {index}"
        where = f"{name}: "
        ids, array = self._token_ids(prompt, name)
        if params is not self._params:
            self._check_params(params, where)
            self._params = params
            self._ends = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.config.eos_token_ids)))
        sizes = self.sizes
        if len(ids) >= sizes.max_seq_len:
            raise ValueError(
                f"{where}{len(ids)} tokens and one of the answer are more than max_seq_len = {sizes.max_seq_len}"
            )
        capacity = sizes.num_blocks * sizes.block_size + 1  # the last token's KV is never needed
        wanted = min(len(ids) + (params.max_tokens or 1), sizes.max_seq_len)
        if wanted > capacity:
            need = ceil_div(wanted - 1, sizes.block_size)
            raise ValueError(
                f"{where}needs {need} blocks of {sizes.block_size} tokens and the KV cache has {sizes.num_blocks}: "
                "raise num_blocks or kv_cache_bytes, or lower max_tokens"
            )
        longest = sizes.max_seq_len if params.max_tokens is None else len(ids) + params.max_tokens
        request = Request(
            ordinal=-1,
            index=index,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=array,
            params=params,
            seed=-1 if params.seed is None else params.seed,
            end_ids=self._ends,
            limit=min(longest, sizes.max_seq_len, capacity),
            tokenizer=self.tokenizer,
        )
        if len(request.bias()) > MAX_BIAS:
            raise ValueError(f"{where}logit_bias and the ids that min_tokens holds back are more than {MAX_BIAS}")
        request.start(ids)
        return request

    def _token_ids(self, prompt: Any, name: str) -> tuple[list[int], Ints]:
        """Return a prompt's tokens, and the same as an array."""
        if isinstance(prompt, Ids):
            return prompt
        if isinstance(prompt, Exception):
            raise prompt  # a conversation that could not be rendered
        if isinstance(prompt, str):
            known = need_tokenizer(self.tokenizer, "a prompt given as text")
            ids = known.encode(prompt) if prompt else []
        elif isinstance(prompt, (list, tuple)):
            ids = list(prompt)
        elif _is_ids(prompt):
            ids = prompt.tolist()
        else:
            raise TypeError(f"{name} must be a str or a list of ints, not {shown(prompt)}")
        if not ids:
            raise ValueError(f"{name} is empty")
        array = _int32s(ids)
        if array is None:  # ints of other types, or far outside of any vocabulary
            if not _is_ids(ids):
                raise TypeError(f"{name} must be a str or a list of ints, not {shown(prompt)}")
            ids = [int(x) for x in ids]
            array = _int32s(ids)
        size = self.config.vocab_size
        if array is None or array.view(np.uint32).max() >= size:  # where a negative one is a large one
            i, token = next((i, token) for i, token in enumerate(ids) if not 0 <= token < size)
            raise ValueError(f"{name}: token id {shown(token)} at place {i} is outside the vocabulary of {size}")
        return ids, array

    def _check_params(self, params: SamplingParams, where: str) -> None:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{where}params must be a SamplingParams, not {type(params).__name__}")
        size = self.config.vocab_size
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or {})):
            for token in ids:
                if not 0 <= token < size:
                    raise ValueError(f"{where}{name}: token id {shown(token)} is outside the vocabulary of {size}")
        if params.stop:
            need_tokenizer(self.tokenizer, "stop text")


def number(request: Request, ordinal: int, engine_seed: int) -> None:
    """Give a new request its number and, where it has none, its seed."""
    request.ordinal = ordinal
    if request.params.seed is None and request.seed < 0:
        request.seed = derive_seed(engine_seed, ordinal)
    for sequence in request.sequences:
        sequence.order = (ordinal, sequence.sample)


def failed(prompt: Any, index: int, error: Exception) -> Generation:
    """Return the answer to a prompt that was refused."""
    text = prompt if isinstance(prompt, str) else None
    return Generation(index, [], "", [], "error", error=f"{type(error).__name__}: {error}", prompt=text)


def fork(request: Request, k: int) -> list[Request]:
    """Make ``k`` requests that go on from where the request's sample 0 stands."""
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= k <= MAX_SAMPLES:
        raise ValueError(f"k must be an int in [1, {MAX_SAMPLES}], not {shown(k)}")
    first = request.sequences[0]
    if first.state == "ended":
        raise ValueError(f"request {request.ordinal} has ended: there is nothing to go on from")
    forks = []
    for _ in range(k):
        new = Request(
            ordinal=-1,
            index=request.index,
            prompt=request.prompt,
            prompt_ids=request.prompt_ids,
            params=request.params,
            seed=request.seed,
            end_ids=request.end_ids,
            limit=request.limit,
            tokenizer=request.tokenizer,
            root=request.root or request,
        )
        sample = (request.root or request).next_sample()
        branch = Sequence(new, sample, list(first.tokens), parent=first)
        branch.logprobs = None if first.logprobs is None else list(first.logprobs)
        new.prompt_logprobs = request.prompt_logprobs
        new.sequences = [branch]
        forks.append(new)
    return forks


@contextmanager
def progress_bar(requests: Seq[Request], show: bool) -> Iterator[Any]:
    """Give a function to be called with the number of requests that are done."""
    if not show:
        yield lambda done: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=len(requests), desc="Answering", unit="prompt") as bar:

        def update(done: int) -> None:
            bar.update(done - bar.n)

        yield update
