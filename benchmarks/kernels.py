"""Time each kernel against cuBLAS, flash and cuDNN attention and the card's bandwidth, in one run.

    python benchmarks/kernels.py [--commit X] [--quick] [--output FILE]

Weights and caches rotate past L2, kernels run in captured graphs, figures are medians. Writes
benchmarks/results/h200_kernels.json on an H200, elsewhere with --output.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import kernels_attention
import torch
from kernels_gemm import gemm_rows

from minivllm import _extension, bench, ops
from minivllm.commands.bench import check_output, write

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


def small_rows() -> list[dict[str, float | str]]:
    """Norm, rotary embedding with the KV write, and the draw, at a decode step's sizes for Llama-3.2-1B."""
    cuda = torch.device("cuda")
    half = {"dtype": torch.bfloat16, "device": cuda}
    weight, angles = torch.ones(2048, **half), torch.randn(4096, 64, device=cuda)
    caches = [torch.zeros(512, 2, 8, 64, 64, **half) for _ in range(8)]
    out: list[dict[str, float | str]] = []
    for rows in (1, 32, 256):
        x, qkv = torch.randn(rows, 2048, **half), torch.randn(rows, 3072, **half)
        logits = torch.randn(rows, 128256, device=cuda)
        slots = torch.arange(rows, dtype=torch.int32, device=cuda)
        table = torch.arange(rows, dtype=torch.int32, device=cuda).view(rows, 1)
        positions = torch.full((rows,), 40, dtype=torch.int32, device=cuda)
        state = torch.zeros(rows, 64, dtype=torch.int32, device=cuda)
        workspace = ops.sample_workspace(rows, 128256, cuda)

        def norm(x: torch.Tensor = x) -> None:
            ops.rms_norm(x, weight, 1e-5)

        def draw(
            logits: torch.Tensor = logits,
            slots: torch.Tensor = slots,
            positions: torch.Tensor = positions,
            state: torch.Tensor = state,
            workspace: torch.Tensor | None = workspace,
        ) -> None:
            ops.sample(logits, slots, positions, state, workspace=workspace)

        ropes = [lambda c=cache, a=(qkv, angles, positions, slots, table): ops.rope_kv(*a, c, 32) for cache in caches]
        for name, calls in (("rms_norm", [norm] * 16), ("rope_kv", ropes * 2), ("sample greedy", [draw] * 8)):
            out.append({"name": name, "num_tokens": rows, "us": kernels_attention.graph_time(calls) * 1e6})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA card")
    result = bench.header("minivllm", "kernels", "cuda", args.commit or bench.commit_name(ROOT))
    output = args.output or (RESULTS / "h200_kernels.json" if "H200" in result["card"] else None)
    try:
        if output is not None:
            check_output(output)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    quick = {"tokens": (1, 64, 256, 2048), "chain_tokens": (1, 32, 64, 128, 256)} if args.quick else {}
    with torch.inference_mode():
        result["linear"] = gemm_rows(ops.Linear, **quick)
        for row in result["linear"]:
            print(row, flush=True)
        attention = kernels_attention.rows(_extension.load(), full=not args.quick)
        result["attention"] = [{"name": name, **figures} for name, figures in attention]
        result["small"] = small_rows()
    for row in result["attention"] + result["small"]:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if output is not None:
        write(output, result)


if __name__ == "__main__":
    main()
