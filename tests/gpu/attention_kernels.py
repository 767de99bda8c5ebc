"""The attention launchers alone, built with nvcc and called through ctypes: no extension needed."""

import ctypes
import pathlib
import subprocess
import tempfile

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ("decode_attention.cu", "prefill_attention.cu", "attention_simt.cu")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WRAPPER = """
#include <cstdio>
#include <exception>
#include "kernels.h"
using namespace minivllm;
template <typename F> static int guarded(F f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\\n", e.what());
    return 1;
  }
}
extern "C" int decode(const AttentionParams* p, Stream s) {
  return guarded([&] { cuda::decode_attention(*p, s); });
}
extern "C" int prefill(const AttentionParams* p, Stream s) {
  return guarded([&] { cuda::prefill_attention(*p, s); });
}
extern "C" int64_t workspace_size(int64_t a, int64_t b, int64_t c, int64_t d) {
  return cuda::attention_workspace_size(a, b, c, d);
}
"""


class KvCache(ctypes.Structure):
    """As in kernels.h."""

    _fields_ = [
        ("cache", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("block_table_stride", "num_blocks", "max_blocks")],
        *[(name, ctypes.c_int64) for name in ("num_kv_heads", "block_size", "head_dim")],
    ]


class AttentionParams(ctypes.Structure):
    """As in kernels.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("out", "q", "slots", "seq_lens", "q_starts")],
        *[(name, ctypes.c_int64) for name in ("num_seqs", "num_tokens", "num_q_heads")],
        *[(name, ctypes.c_int64) for name in ("max_q_len", "max_seq_len")],
        ("scale", ctypes.c_float),
        ("workspace", ctypes.c_void_p),
        ("kv", KvCache),
        ("dtype", ctypes.c_int32),
        ("settled", ctypes.c_bool),
    ]


def build(folder: pathlib.Path, arch: str = "90a") -> pathlib.Path:
    """Compile the launchers, all files at once; the path of the library."""
    (folder / "wrapper.cpp").write_text(WRAPPER)
    flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", f"-I{ROOT / 'csrc'}"]
    flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    paths = [folder / "wrapper.cpp", *(ROOT / "csrc/cuda" / s for s in SOURCES)]
    builds = [
        subprocess.Popen(["nvcc", *flags, "-c", str(path), "-o", str(folder / f"{path.stem}.o")]) for path in paths
    ]
    codes = [process.wait() for process in builds]
    if any(codes):
        raise RuntimeError("nvcc failed")
    library = folder / "attention.so"
    objects = [str(folder / f"{path.stem}.o") for path in paths]
    subprocess.run(["nvcc", "-shared", "-o", str(library), *objects], check=True)
    return library


class Kernels:
    """decode_attention and prefill_attention with the extension's signatures."""

    def __init__(self, library: str | None = None) -> None:
        self._library = ctypes.CDLL(library or str(build(pathlib.Path(tempfile.mkdtemp()))))
        self._library.workspace_size.restype = ctypes.c_int64
        self._library.workspace_size.argtypes = [ctypes.c_int64] * 4

    def attention_workspace_size(self, max_seqs: int, max_seq_len: int, num_q_heads: int, head_dim: int) -> int:
        """Bytes of decode_attention's workspace."""
        return int(self._library.workspace_size(max_seqs, max_seq_len, num_q_heads, head_dim))

    def decode_attention(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        scale: float,
        workspace: torch.Tensor | None,
        settled: bool = False,
    ) -> None:
        """One row of q a sequence."""
        p = self._params(out, q, kv_cache, block_table, slots, seq_lens, 1, max_seq_len, scale)
        p.workspace = workspace.data_ptr() if workspace is not None else None
        p.settled = settled
        self._call(self._library.decode, p)

    def prefill_attention(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        q_starts: torch.Tensor,
        max_q_len: int,
        max_seq_len: int,
        scale: float,
    ) -> None:
        """Sequence s owns the rows q_starts[s] .. q_starts[s + 1] of q."""
        p = self._params(out, q, kv_cache, block_table, slots, seq_lens, max_q_len, max_seq_len, scale)
        p.q_starts = q_starts.data_ptr()
        self._call(self._library.prefill, p)

    def _params(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int,
        max_seq_len: int,
        scale: float,
    ) -> AttentionParams:
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        kv = KvCache(
            kv_cache.data_ptr(),
            block_table.data_ptr(),
            block_table.stride(0),
            num_blocks,
            block_table.shape[1],
            num_kv_heads,
            block_size,
            head_dim,
        )
        return AttentionParams(
            out.data_ptr(),
            q.data_ptr(),
            slots.data_ptr(),
            seq_lens.data_ptr(),
            None,
            slots.numel(),
            q.shape[0],
            q.shape[1],
            max_q_len,
            max_seq_len,
            scale,
            None,
            kv,
            DTYPES[q.dtype],
            False,
        )

    def _call(self, function: "ctypes._NamedFuncPointer", p: AttentionParams) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if function(ctypes.byref(p), stream):
            raise RuntimeError("launch failed")
