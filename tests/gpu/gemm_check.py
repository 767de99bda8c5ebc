"""Checks the CUDA matrix products alone: no package, no bindings, only nvcc, ctypes and torch.

Run ``python tests/gpu/gemm_check.py``; ``--quick few`` and ``--quick many`` take few shapes, of few tokens and of more.
It compiles csrc/cuda/gemm*.cu for this card, then compares every instance for any task and every epilogue with torch,
and asks for the same bits whatever the number of tokens. The instances for parts of a layer and for leaders have
test_fused.py and test_leaders.py.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
NONE, RESIDUAL, SILU_MUL = range(3)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# warpgroups, columns, k-blocks a stage, CTAs of a cluster: the instances of csrc/cuda/gemm_sm90.cuh
INSTANCES = [
    *[(1, n, b, 1) for n in (16, 24, 32) for b in (1, 4, 8)],
    *[(1, n, b, 1) for n, b in ((48, 1), (48, 4), (64, 1), (64, 2), (96, 1), (128, 1))],
    *[(2, n, 1, 1) for n in (128, 192, 256)],
    *[(1, n, b, 2) for n, b in ((32, 4), (48, 4), (64, 2), (96, 1), (128, 1))],
    *[(2, n, 1, 2) for n in (32, 64, 96, 128, 192, 256)],
]
# Those that walk all chunks of K and add up: warpgroups, columns, CTAs of a cluster.
SUMS = [(w, n, cluster) for w, n in ((1, 64), (1, 128), (2, 128), (2, 192), (2, 256)) for cluster in (1, 2)]
# Those whose clusters split K: warpgroups, columns, k-blocks a stage.
SPLITS = [(1, 64, 2)]
WRAPPER = """
#include <cstdio>
#include "{root}/csrc/cuda/common.cuh"
#include "{root}/csrc/cuda/gemm.cuh"
using namespace minivllm;
extern "C" int gemm(void* out, const void* x, const void* weight, const void* bias, int64_t num_tokens,
                    int64_t n, int64_t k, int64_t x_stride, int64_t out_stride, int epilogue, int dtype,
                    int out_dtype, const int* config, int64_t num_chunks, float* parts, void* stream) {{
  LinearParams p = {{out, x, weight, bias, num_tokens, n, k, x_stride, out_stride,
                    static_cast<Epilogue>(epilogue), static_cast<DType>(dtype),
                    static_cast<DType>(out_dtype), num_chunks, parts}};
  try {{
    const Stream s = static_cast<Stream>(stream);
    if (!cuda::linear_uses_wgmma(p)) return 2;
    if (config == nullptr) {{ cuda::linear(p, s); return 0; }}
    const cuda::GemmConfig c = {{config[0], config[1], config[2], config[3],
                                static_cast<cuda::Sharing>(config[4]), static_cast<cuda::Chunks>(config[5])}};
    if (p.dtype == DType::kBFloat16) cuda::launch_gemm_bf16(p, c, s); else cuda::launch_gemm_fp16(p, c, s);
    return 0;
  }} catch (const std::exception& e) {{ fprintf(stderr, "%s\\n", e.what()); return 1; }}
}}
extern "C" int64_t chunks(int64_t n, int64_t k, int epilogue) {{
  return cuda::linear_chunks(n, k, static_cast<Epilogue>(epilogue));
}}
"""


def build() -> ctypes.CDLL:
    """Compiles the sources and a C wrapper into a shared library, once for each text, and loads it."""
    source = WRAPPER.format(root=ROOT)
    files = sorted((ROOT / "csrc/cuda").glob("*.cu*"))
    digest = hashlib.sha256(source.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"gemm_check_{digest[:16]}"
    folder.mkdir(exist_ok=True)
    wrapper = folder / "wrapper.cu"
    wrapper.write_text(source)
    sources = [wrapper, *[file for file in files if file.match("gemm*.cu") or file.name == "weigh_rows.cu"]]
    flags = ["-O3", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC"]

    def compile_one(source: Path) -> str:
        target = str(folder / (source.stem + ".o"))
        subprocess.run(["nvcc", *flags, "-c", str(source), "-o", target], check=True)
        return target

    library = folder / "gemm.so"
    if not library.exists():
        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_one, sources))
        linked = folder / f"gemm.{os.getpid()}.so"  # an interrupted link leaves no library behind
        subprocess.run(["nvcc", "-shared", "-o", str(linked), *objects], check=True)
        linked.replace(library)
    loaded = ctypes.CDLL(str(library))
    pointer, wide = ctypes.c_void_p, ctypes.c_int64
    loaded.gemm.argtypes = [pointer] * 4 + [wide] * 5 + [ctypes.c_int] * 3 + [pointer, wide, pointer, pointer]
    loaded.chunks.argtypes, loaded.chunks.restype = [wide, wide, ctypes.c_int], wide
    return loaded


class Gemm:
    """Calls the library on tensors."""

    def __init__(self) -> None:
        self.library = build()

    def __call__(self, out, x, weight, bias=None, epilogue=NONE, config=None, num_chunks=1) -> None:
        n, k = weight.shape
        values = None if config is None else (ctypes.c_int * 6)(*config)
        parts = out.dim() == 3  # [num_chunks, num_tokens, n] float32
        status = self.library.gemm(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            x.shape[0],
            n,
            k,
            x.stride(0),
            out.stride(-2),
            epilogue,
            DTYPES[x.dtype],
            DTYPES[out.dtype],
            values,
            num_chunks,
            out.data_ptr() if parts else None,
            torch.cuda.current_stream().cuda_stream,
        )
        if status:
            raise RuntimeError(f"gemm failed with {status}: {tuple(x.shape)} {tuple(weight.shape)} {config}")

    def chunks(self, n: int, k: int, epilogue: int = NONE) -> int:
        return self.library.chunks(n, k, epilogue)


def poisoned(rows: int, columns: int, dtype: torch.dtype, extra: int = 8) -> torch.Tensor:
    """A [rows, columns] view inside a larger buffer of a sentinel."""
    return torch.full((rows + 2, columns + extra), 12345.0, dtype=dtype, device="cuda")


def run(gemm: Gemm, x, weight, dtype, columns=None, **kwargs) -> torch.Tensor:
    """One product into a poisoned buffer; asserts that nothing outside the output was written."""
    columns = columns or weight.shape[0]
    buffer = poisoned(x.shape[0], columns, dtype)
    sentinel = buffer[0, 0].clone()
    out = buffer[1:-1, :columns]
    gemm(out, x, weight, **kwargs)
    assert (buffer[0] == sentinel).all() and (buffer[-1] == sentinel).all(), "rows outside were written"
    assert (buffer[:, columns:] == sentinel).all(), "columns outside were written"
    return out.clone()


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()


def check_shape(gemm: Gemm, n: int, k: int, dtype: torch.dtype, tokens: list[int], instances: bool) -> int:
    """Compares one shape with float64 and all numbers of tokens with each other; returns the checks."""
    generator = torch.Generator("cuda").manual_seed(n * 31 + k)
    top = max(tokens)
    weight = torch.randn(n, k, device="cuda", generator=generator, dtype=torch.float32).mul_(0.03).to(dtype)
    x_all = torch.randn(top, k + 8, device="cuda", generator=generator).to(dtype)[:, :k]
    bias = torch.randn(n, device="cuda", generator=generator).to(dtype)
    full = run(gemm, x_all, weight, torch.float32)
    reference = x_all.double() @ weight.double().T
    error = relative_error(full, reference)
    assert error < 3e-5, f"n={n} k={k}: error {error}"
    checks = 1
    for m in tokens:
        rows = torch.randperm(top, device="cuda", generator=generator)[:m]
        x = torch.empty(m, k + 8, device="cuda", dtype=dtype)[:, :k].copy_(x_all[rows])
        y = full[rows]
        configs: list[tuple[int, ...] | None] = [None]
        if instances:
            configs += [
                (*i[:3], ring * 1024, sharing, 0)
                for i in INSTANCES
                for ring in (192, 90)
                for sharing in ((0,) if i[3] == 1 else (1, 2))
                if (k // 64) % i[2] == 0 and (i[0] == 1 or m > 64)
                if not (sharing == 1 and i[2] == 1 and m <= 8)
            ]
        for config in configs:
            where = f"n={n} k={k} m={m} {dtype} {config}"
            assert torch.equal(run(gemm, x, weight, torch.float32, config=config), y), f"float {where}"
            assert torch.equal(run(gemm, x, weight, dtype, config=config), y.to(dtype)), f"rounded {where}"
            with_bias = run(gemm, x, weight, dtype, bias=bias, config=config)
            assert torch.equal(with_bias, (y + bias.float()).to(dtype)), f"bias {where}"
            buffer = poisoned(m, n, dtype)
            out = buffer[1:-1, :n]
            old = torch.randn(m, n, device="cuda", generator=generator).to(dtype)
            out.copy_(old)
            gemm(out, x, weight, epilogue=RESIDUAL, config=config)
            assert torch.equal(out, (old.float() + y).to(dtype)), f"residual {where}"
            assert (buffer[:, n:] == buffer[0, 0]).all() and (buffer[-1] == buffer[0, 0]).all(), where
            gate, up = y[:, 0::2].double(), y[:, 1::2].double()
            expected = gate / (1 + torch.exp(-gate)) * up
            if config is not None and config[:2] == (2, 192):
                continue  # no SiLU there
            out = run(gemm, x, weight, dtype, columns=n // 2, epilogue=SILU_MUL, config=config)
            rounding = torch.finfo(dtype).eps
            assert ((out.double() - expected).abs() <= rounding * expected.abs() + 1e-6).all(), f"silu {where}"
            checks += 5
    return checks


def check_chunks(gemm: Gemm, n: int, k: int, dtype: torch.dtype, tokens: list[int]) -> int:
    """Compares the two ways of adding up K's chunks, and all numbers of tokens; returns the checks."""
    generator = torch.Generator("cuda").manual_seed(n * 37 + k)
    num_chunks, top = gemm.chunks(n, k), max(tokens)
    assert num_chunks > 1, f"n={n} k={k} is one chain"
    weight = torch.randn(n, k, device="cuda", generator=generator).mul_(0.03).to(dtype)
    x_all = torch.randn(top, k, device="cuda", generator=generator).to(dtype)
    full = run(gemm, x_all, weight, torch.float32, num_chunks=num_chunks)
    error = relative_error(full, x_all.double() @ weight.double().T)
    assert error < 3e-5, f"n={n} k={k}: error {error}"
    checks = 1
    sharings = {1: (0,), 2: (1, 2)}
    whole = [(w, c, 1, (150 if c == 256 else 192) * 1024, s, 1) for w, c, cluster in SUMS for s in sharings[cluster]]
    whole += [(*split, ring * 1024, 0, 2) for split in SPLITS for ring in (90, 50)]
    in_parts = [
        (*i[:3], 192 * 1024, s, 0) for i in INSTANCES for s in sharings[i[3]] if (k // num_chunks // 64) % i[2] == 0
    ]
    for m in tokens:
        rows = torch.randperm(top, device="cuda", generator=generator)[:m]
        x, y = x_all[rows].contiguous(), full[rows]
        for config in [None, *whole]:
            if config is not None and config[0] == config[4] == 1 and m <= 8:
                continue  # too few rows to copy half of them each
            where = f"n={n} k={k} m={m} {dtype} {config}"
            old = torch.randn(m, n, device="cuda", generator=generator).to(dtype)
            out = old.clone()
            gemm(out, x, weight, epilogue=RESIDUAL, config=config, num_chunks=num_chunks)
            assert torch.equal(out, (old.float() + y).to(dtype)), f"residual {where}"
            rounded = run(gemm, x, weight, dtype, config=config, num_chunks=num_chunks)
            assert torch.equal(rounded, y.to(dtype)), f"rounded {where}"
            checks += 2
        for config in [None, *in_parts]:
            if config is not None and ((config[0] == 2 and m <= 64) or (config[4] == 1 and config[2] == 1 and m <= 8)):
                continue
            buffer = torch.full((num_chunks + 1, m, n), torch.nan, device="cuda")
            gemm(buffer[:num_chunks], x, weight, config=config, num_chunks=num_chunks)
            total = buffer[0]
            for part in buffer[1:num_chunks]:
                total = total + part
            assert torch.equal(total, y), f"parts n={n} k={k} m={m} {dtype} {config}"
            assert buffer[num_chunks].isnan().all(), "parts outside were written"
            checks += 1
    return checks


def quick_checks(gemm: Gemm, tokens: str) -> int:
    """Every instance once or twice, for compute-sanitizer: in two halves that take as long."""
    if tokens == "many":
        checks = check_shape(gemm, 1008, 1024, torch.bfloat16, [130], instances=True)
        return checks + check_shape(gemm, 1008, 192, torch.bfloat16, [300], instances=True)
    checks = check_shape(gemm, 1008, 1024, torch.bfloat16, [9], instances=True)
    checks += check_shape(gemm, 576, 576, torch.float16, [65], instances=True)
    return checks + check_chunks(gemm, 1032, 2048, torch.bfloat16, [17, 130])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", choices=("few", "many"), help="few shapes, of few tokens or of more")
    quick = parser.parse_args().quick
    start = time.time()
    gemm = Gemm()
    print(f"built in {time.time() - start:.0f} s", flush=True)
    if quick:
        print(f"{quick_checks(gemm, quick)} checks passed in {time.time() - start:.0f} s")
        return
    odd = [1, 2, 7, 8, 9, 16, 17, 33, 63, 64, 65, 127, 128, 129, 200, 256, 300, 512, 1000, 2048]
    checks = 0
    for n, k in ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)):
        checks += check_shape(gemm, n, k, torch.bfloat16, odd, instances=False)
    checks += check_shape(gemm, 128256, 2048, torch.bfloat16, [1, 9, 64, 130, 256], instances=False)
    for n, k in ((576, 576), (960, 576), (3072, 576), (576, 1536), (49152, 576), (16, 64), (1008, 192)):
        checks += check_shape(gemm, n, k, torch.bfloat16, [1, 7, 33, 65, 200, 512], instances=False)
    for dtype in (torch.bfloat16, torch.float16):
        checks += check_shape(gemm, 1008, 1024, dtype, [1, 9, 31, 40, 64, 65, 129, 300], instances=True)
        checks += check_shape(gemm, 4096, 512, dtype, [3, 57, 700], instances=True)
        # Tiles of fewer stages than the ring has.
        checks += check_shape(gemm, 1008, 192, dtype, [130, 300, 700], instances=True)
        checks += check_shape(gemm, 4096, 64, dtype, [130, 700], instances=True)
    for dtype in (torch.bfloat16, torch.float16):
        checks += check_chunks(gemm, 3072, 2048, dtype, [1, 9, 64, 65, 130, 256, 300, 2048])
        checks += check_chunks(gemm, 2048, 8192, dtype, [1, 8, 17, 64, 128, 200, 1000])
        checks += check_chunks(gemm, 1032, 4096, dtype, [1, 33, 127, 129, 255])
    torch.cuda.synchronize()
    print(f"{checks} checks passed in {time.time() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
