"""Matrix products: times, rates and bandwidth beside torch's, alone and as a decode step's chain."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from kernels_attention import graph_time

DEVICE = "cuda"
ROTATE_BYTES = 200 << 20  # weights of a timed sequence together: well past L2
MAX_COPIES = 24
# Llama-3.2-1B: name -> (out_size, in_size)
LAYER = {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}
LM_HEAD = (128256, 2048)
NUM_LAYERS = 16


def random_weight(out_size: int, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    """A weight whose products with normal rows stay near 1."""
    return torch.randn(out_size, in_size, device=DEVICE).mul_(in_size**-0.5).to(dtype)


def shape_row(
    linear: Any, name: str, num_tokens: int, size: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """One shape: ours with the epilogue that a layer gives it, and a plain product by torch.

    Parameters
    ----------
    linear
        The class ``minivllm.linear.Linear``.
    name
        A key of ``LAYER``, or ``lm_head``.
    num_tokens
        Rows of the input.
    size
        ``(out_size, in_size)``.
    dtype
        Of the weight and the input.
    """
    out_size, in_size = size
    copies = max(1, min(MAX_COPIES, ROTATE_BYTES // (out_size * in_size * dtype.itemsize)))
    weights = [random_weight(out_size, in_size, dtype) for _ in range(copies)]
    ours = [linear(weight, gate_up=name == "gate_up") for weight in weights]
    x = torch.randn(num_tokens, in_size, device=DEVICE).to(dtype)
    residual = torch.zeros(num_tokens, out_size, device=DEVICE, dtype=dtype)

    def run_ours() -> None:  # as the model does: additions that the next kernel does better are left to it
        for product in ours:
            if name in ("o", "down"):
                product.add_to(residual, x)
            elif name == "qkv":
                product.begin(x)
            else:
                product(x, out_dtype=torch.float32 if name == "lm_head" else None)

    def run_torch() -> None:
        for weight in weights:
            F.linear(x, weight)

    seconds, torch_seconds = graph_time([run_ours]) / copies, graph_time([run_torch]) / copies
    return {
        "name": name,
        "num_tokens": num_tokens,
        "us": round(seconds * 1e6, 2),
        "torch_us": round(torch_seconds * 1e6, 2),
        "times_torch": round(torch_seconds / seconds, 3),
        "tflops": round(2 * num_tokens * out_size * in_size / seconds / 1e12, 1),
        "weights_tb_per_s": round(out_size * in_size * dtype.itemsize / seconds / 1e12, 3),
    }


def chain_row(linear: Any, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """All products of one decode step of Llama-3.2-1B in one graph, every weight its own."""
    weights = [{name: random_weight(*size, dtype) for name, size in LAYER.items()} for _ in range(NUM_LAYERS)]
    head = random_weight(*LM_HEAD, dtype)
    layers = [{name: linear(weight, gate_up=name == "gate_up") for name, weight in layer.items()} for layer in weights]
    our_head = linear(head)
    x = {name: torch.randn(num_tokens, size[1], device=DEVICE).to(dtype) for name, size in LAYER.items()}
    residual = torch.zeros(num_tokens, LM_HEAD[1], device=DEVICE, dtype=dtype)

    def run_ours() -> None:
        for layer in layers:
            layer["qkv"].begin(x["qkv"])
            layer["o"].add_to(residual, x["o"])
            layer["down"].add_to(residual, layer["gate_up"](x["gate_up"]))
        our_head(x["qkv"], out_dtype=torch.float32)

    def run_torch() -> None:
        for layer in weights:
            for name, weight in layer.items():
                F.linear(x[name], weight)
        F.linear(x["qkv"], head)

    seconds, torch_seconds = graph_time([run_ours]), graph_time([run_torch])
    elements = NUM_LAYERS * sum(n * k for n, k in LAYER.values()) + LM_HEAD[0] * LM_HEAD[1]
    return {
        "name": "decode_step",
        "num_tokens": num_tokens,
        "us": round(seconds * 1e6, 1),
        "torch_us": round(torch_seconds * 1e6, 1),
        "times_torch": round(torch_seconds / seconds, 3),
        "weights_tb_per_s": round(2 * elements / seconds / 1e12, 3),
    }


def gemm_rows(
    linear: Any,
    tokens: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 512, 2048, 8192),
    chain_tokens: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256),
) -> list[dict[str, Any]]:
    """Every shape at every number of tokens, then the chains."""
    sizes = {**LAYER, "lm_head": LM_HEAD}
    rows = [
        shape_row(linear, name, num_tokens, size)
        for num_tokens in tokens
        for name, size in sizes.items()
        if not (name == "lm_head" and num_tokens > 2048)
    ]
    return rows + other_rows(linear) + [chain_row(linear, num_tokens) for num_tokens in chain_tokens]


def other_rows(linear: Any, tokens: tuple[int, ...] = (1, 8, 16, 64, 256, 1024, 4096)) -> list[dict[str, Any]]:
    """The kernels for every card: float32, and bfloat16 of inputs that the kernel for Hopper does not take."""
    rows = []
    for dtype, more in ((torch.float32, 0), (torch.bfloat16, 8)):
        for size in (LAYER["o"], LAYER["down"], LAYER["gate_up"]):
            out_size, in_size = size[0], size[1] + more
            for num_tokens in tokens:
                row = shape_row(linear, "plain", num_tokens, (out_size, in_size), dtype)
                name = f"{str(dtype).removeprefix('torch.')} {out_size}x{in_size}"
                rows.append({**row, "name": name})
    return rows
