"""Flags that several commands share: the engine's sizes, and how tokens are drawn."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, NoReturn

from minivllm.request import SamplingParams

if TYPE_CHECKING:
    from minivllm.engine import BatchEngine

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parse_bytes(text: str) -> int:
    """Read a size: 4096, 512MB (of 1000), 8GiB (of 1024), 8e9."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8GiB, 500MB or 4096")
    try:
        number = float(found[1])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8GiB, 500MB or 4096") from None
    size = int(number * (_UNITS | _BINARY)[found[2]])
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a byte")
    return size


def format_bytes(size: float) -> str:
    """Write a size for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the model and the engine's arguments."""
    parser.add_argument(
        "model", metavar="MODEL", help="a directory in the Hugging Face layout, a .gguf file, or a hub id"
    )
    group = parser.add_argument_group("engine")
    group.add_argument("--device", help="cpu or cuda (default: cuda where there is a card)")
    group.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32 (default: the file's own)")
    group.add_argument(
        "--num-slots", type=int, metavar="N", help="requests that run at once (default: 256, on the CPU 8)"
    )
    group.add_argument(
        "--block-size", type=int, metavar="N", help="tokens a block of the KV cache (default: 64, CPU 16)"
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--num-blocks", type=int, metavar="N", help="size of the KV cache in blocks")
    size.add_argument("--kv-cache-bytes", type=parse_bytes, metavar="SIZE", help="size of the KV cache, such as 8GiB")
    group.add_argument(
        "--max-seq-len", type=int, metavar="N", help="longest prompt and answer, in tokens (default: the model's)"
    )
    group.add_argument(
        "--max-step-tokens",
        type=int,
        metavar="N",
        help="tokens a step; longer prompts are cut (default: 8192, CPU 512)",
    )
    group.add_argument(
        "--no-prefix-caching", dest="prefix_caching", action="store_false", help="compute equal prompt beginnings anew"
    )
    group.add_argument(
        "--no-cuda-graphs", dest="cuda_graphs", action="store_false", help="launch every kernel by itself"
    )
    add_exact(group)


def add_exact(parser: argparse._ActionsContainer) -> None:
    """Add the flag that gives exactness up."""
    parser.add_argument(
        "--no-exact",
        dest="exact",
        action="store_false",
        help="let cuBLAS multiply where it is faster; answers may then depend on the batch (no effect on the CPU)",
    )


def check_device(device: str | None) -> str:
    """Return the device's full name, "cpu" or such as "cuda:0"; ValueError for one that is not here."""
    from minivllm.intake import choose_device

    try:
        return str(choose_device(device))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def make_engine(args: argparse.Namespace, progress: bool = False, **defaults: Any) -> BatchEngine:
    """Build the engine that the flags describe; ``defaults`` stand in for flags that were not given."""
    from minivllm.engine import BatchEngine

    check_device(args.device)
    names = [
        "device",
        "dtype",
        "num_slots",
        "block_size",
        "num_blocks",
        "kv_cache_bytes",
        "max_seq_len",
        "max_step_tokens",
        "prefix_caching",
        "cuda_graphs",
        "exact",
    ]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return BatchEngine(args.model, progress=progress, **{**defaults, **given})


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 2,32000") from None


def _bias(text: str) -> dict[int, float]:
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {int(token): float(value) for token, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 17=-5,42=2.5") from None


def add_sampling(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Add a flag for each field of `SamplingParams` that a command line can carry."""
    group = parser.add_argument_group("sampling")

    def add(name: str, *short: str, **how: Any) -> None:
        if name not in without:
            group.add_argument(*short, f"--{name.replace('_', '-')}", dest=name, default=None, **how)

    add("temperature", type=float, metavar="T", help="0 takes the likeliest token (default: 0)")
    add("top_k", type=int, metavar="K", help="keep the K likeliest tokens (default: all)")
    add("top_p", type=float, metavar="P", help="keep the likeliest tokens that together reach P (default: 1)")
    add("min_p", type=float, metavar="P", help="keep tokens at least P times as likely as the likeliest (default: 0)")
    add(
        "max_tokens", type=int, metavar="N", help="at most N new tokens (default: to the end token or the length limit)"
    )
    add("min_tokens", type=int, metavar="N", help="no end before N new tokens")
    add("n", "-n", type=int, metavar="N", help="answers a prompt (default: 1)")
    add("seed", type=int, metavar="SEED", help="draw the same tokens again (default: a seed for each prompt)")
    add("stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("stop_token_ids", type=_ids, metavar="ID,…", help="end at these token ids too")
    add("ignore_eos", action="store_true", help="go on past the model's end tokens")
    add("include_stop_str_in_output", action="store_true", help="keep the stop text in the answer")
    add(
        "skip_special_tokens",
        action=argparse.BooleanOptionalAction,
        help="leave special tokens out of the text (default: yes)",
    )
    add("logprobs", type=int, metavar="K", help="log probabilities of each token and of the K likeliest (in JSONL)")
    add("prompt_logprobs", type=int, metavar="K", help="the same for the prompt's tokens")
    add("repetition_penalty", type=float, metavar="X", help="above 1: tokens of prompt and answer become less likely")
    add("presence_penalty", type=float, metavar="X", help="subtracted once for tokens of the answer")
    add("frequency_penalty", type=float, metavar="X", help="subtracted once an occurrence in the answer")
    add("logit_bias", type=_bias, metavar="ID=X,…", help="added to the logits of these tokens")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters that were given, checked."""
    values = {name: getattr(args, name, None) for name in SamplingParams.__dataclass_fields__}
    given = {name: value for name, value in values.items() if value is not None}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    SamplingParams(**given)
    return given
