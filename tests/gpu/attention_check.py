"""Attention kernels on a GPU: against float32, with a poisoned pool, and bit for bit between decode,
prefill, chunks, batches and block sizes. Run it; `--bench` adds benchmarks/kernels_attention.py.
"""

import argparse
import itertools
import math
import sys
import time

import torch
from attention_kernels import ROOT, Kernels

HEADS = ((32, 8), (24, 8), (14, 2), (28, 4), (40, 8), (9, 3), (8, 8), (8, 1), (20, 1))
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}
HUGE = 2**31 - 1
DEVICE = "cuda"


class Pool:
    """A cache filled with NaN and inf but for the sequences' own keys and values, blocks shuffled."""

    def __init__(
        self,
        lengths: list[int],
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        gen = torch.Generator(DEVICE).manual_seed(seed)
        self.lengths, self.dtype = lengths, dtype
        counts = [-(-n // block_size) for n in lengths]
        num_blocks = sum(counts) + 3
        shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
        self.cache = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
        self.cache[:, :, :, ::2] = math.inf
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.table = torch.full((len(lengths) + 2, max(counts) + 2), -1, dtype=torch.int32)
        self.table[:, 1::2] = HUGE
        self.slots = torch.randperm(len(lengths) + 2)[: len(lengths)].to(torch.int32)
        self.keys, self.values = [], []
        at = 0
        for n, count, slot in zip(lengths, counts, self.slots.tolist(), strict=True):
            own = ids[at : at + count]
            at += count
            self.table[slot, :count] = own.to(torch.int32)
            kv = torch.randn(2, num_kv_heads, n, head_dim, generator=gen, device=DEVICE).to(dtype)
            padded = self.cache[own.to(DEVICE)].permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
            padded[:, :, :n] = kv
            blocks = padded.reshape(2, num_kv_heads, count, block_size, head_dim).permute(2, 0, 1, 3, 4)
            self.cache[own.to(DEVICE)] = blocks
            self.keys.append(kv[0])
            self.values.append(kv[1])
        self.table, self.slots = self.table.to(DEVICE), self.slots.to(DEVICE)


def reference(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """q [rows, heads, head_dim], the last row at the last key."""
    group = q.shape[1] // keys.shape[0]
    k = keys.double().repeat_interleave(group, 0)
    v = values.double().repeat_interleave(group, 0)
    scores = torch.einsum("rhd,hnd->hrn", q.double(), k) * scale
    rows, n = q.shape[0], keys.shape[1]
    row = torch.arange(n - rows, n, device=q.device)[:, None]
    scores.masked_fill_(torch.arange(n, device=q.device)[None] > row, -math.inf)
    return torch.einsum("hrn,hnd->rhd", scores.softmax(-1), v)


class Checks:
    """Runs, counts and reports."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.failed, self.passed = kernels, 0, 0
        self.worst: dict[torch.dtype, float] = {}
        size = kernels.attention_workspace_size(512, 131072, 64, 256)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=DEVICE)

    def expect(self, good: bool, what: str) -> None:
        self.passed += good
        self.failed += not good
        if not good and self.failed < 60:
            print("FAILED", what, flush=True)

    def close(self, out: torch.Tensor, ref: torch.Tensor, what: str) -> None:
        error = ((out.double() - ref).norm() / ref.norm()).item()
        self.worst[out.dtype] = max(self.worst.get(out.dtype, 0.0), error if error == error else math.inf)
        self.expect(error < TOLERANCE[out.dtype], f"{what}: error {error:.2e}")

    def same(self, a: torch.Tensor, b: torch.Tensor, what: str) -> None:
        width = torch.int32 if a.dtype == torch.float32 else torch.int16
        wrong = (a.contiguous().view(width) != b.contiguous().view(width)).double().mean().item()
        self.expect(wrong == 0, f"{what}: {wrong:.1%} of the bits' words differ")

    def decode(self, pool: Pool, q: torch.Tensor, which: list[int], lens: list[int], pad: int = 0) -> torch.Tensor:
        """q [len(which), heads, dim]; pad rows with slot -1 after them."""
        slots = torch.cat([pool.slots[which], torch.full((pad,), -1, dtype=torch.int32, device=DEVICE)])
        seq_lens = torch.tensor(lens + [HUGE] * pad, dtype=torch.int32, device=DEVICE)
        q = torch.cat([q, torch.full((pad, *q.shape[1:]), math.nan, dtype=q.dtype, device=DEVICE)])
        out = torch.full_like(q, math.nan)
        # torch's kernels let nothing start before they have ended, so all is settled: either way is right.
        settled = len(which) % 2 == 0
        self.kernels.decode_attention(
            out, q, pool.cache, pool.table, slots, seq_lens, max(lens), q.shape[2] ** -0.5, self.workspace, settled
        )
        if pad:
            self.expect(bool(out[len(which) :].isnan().all()), "padding rows written")
        return out[: len(which)]

    def prefill(self, pool: Pool, q: list[torch.Tensor], which: list[int], lens: list[int]) -> list[torch.Tensor]:
        """q: new tokens of each sequence, which end at lens."""
        starts = [0]
        for x in q:
            starts.append(starts[-1] + x.shape[0])
        packed = torch.cat(q)
        out = torch.full_like(packed, math.nan)
        ints = {"dtype": torch.int32, "device": DEVICE}
        self.kernels.prefill_attention(
            out,
            packed,
            pool.cache,
            pool.table,
            pool.slots[which],
            torch.tensor(lens, **ints),
            torch.tensor(starts, **ints),
            max(x.shape[0] for x in q),
            max(lens),
            packed.shape[2] ** -0.5,
        )
        return [out[a:b] for a, b in itertools.pairwise(starts)]


def check_shape(
    c: Checks, heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, long: bool
) -> None:
    """One shape: accuracy, poison, and every bitwise promise."""
    name = f"heads {heads[0]}/{heads[1]} dim {head_dim} block {block_size} {dtype}"
    b = block_size
    lengths = sorted({1, 2, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 63, 64, 65, 255, 256, 257} - {0})
    lengths += [511, 512, 513, 1000, *([5000] if long else [])]
    pool = Pool(lengths, heads[1], head_dim, b, dtype)
    gen = torch.Generator(DEVICE).manual_seed(1)
    q = [torch.randn(n, heads[0], head_dim, generator=gen, device=DEVICE).mul_(2).to(dtype) for n in lengths]
    everyone = list(range(len(lengths)))
    scale = head_dim**-0.5
    full = c.prefill(pool, q, everyone, lengths)
    last = c.decode(pool, torch.stack([x[-1] for x in q]), everyone, lengths, pad=3)
    for i, n in enumerate(lengths):
        if n <= 1000:
            c.close(full[i], reference(q[i], pool.keys[i], pool.values[i], scale), f"prefill {name} len {n}")
        else:
            ref = reference(q[i][-64:], pool.keys[i], pool.values[i], scale)
            c.close(full[i][-64:], ref, f"prefill {name} len {n}")
        ref = reference(q[i][-1:], pool.keys[i], pool.values[i], scale)
        c.close(last[i : i + 1], ref, f"decode {name} len {n}")
        c.same(last[i], full[i][-1], f"decode against prefill {name} len {n}")
        alone = c.decode(pool, q[i][-1:], [i], [n])
        c.same(alone[0], last[i], f"decode alone {name} len {n}")
    # Every position of one sequence, as rows of one decode batch: more rows than the card has places.
    i = lengths.index(1000)
    for at in range(0, 1000, 500):
        rows = list(range(at, at + 500, 1 if long else 7))
        some = c.decode(pool, q[i][rows], [i] * len(rows), [r + 1 for r in rows])
        c.same(some, full[i][rows], f"decode of all positions against prefill {name}")
    # More rows than the kernel takes in which warps hand them over.
    rows = list(range(280))
    some = c.decode(pool, q[i][rows], [i] * len(rows), [r + 1 for r in rows])
    c.same(some, full[i][rows], f"decode of many short rows against prefill {name}")
    for chunk in (64, 100, 512):
        parts = [c.prefill(pool, [q[i][a : a + chunk]], [i], [min(a + chunk, 1000)])[0] for a in range(0, 1000, chunk)]
        c.same(torch.cat(parts), full[i], f"chunks of {chunk} {name}")
    if long:
        i = len(lengths) - 1
        part = c.prefill(pool, [q[i][4096 - 50 : 4096 + 77]], [i], [4096 + 77])[0]
        c.same(part, full[i][4096 - 50 : 4096 + 77], f"late chunk {name}")
    torch.cuda.synchronize()


def check_block_sizes(c: Checks, head_dim: int, dtype: torch.dtype) -> None:
    """The same keys and values in blocks of every size: wgmma, mma.sync and decode agree."""
    lengths = [1000, 300, 77]
    out = {}
    for block_size in (64, 1, 2, 16, 32, 48, 128):
        pool = Pool(lengths, 2, head_dim, block_size, dtype)
        gen = torch.Generator(DEVICE).manual_seed(2)
        q = [torch.randn(n, 8, head_dim, generator=gen, device=DEVICE).to(dtype) for n in lengths]
        out[block_size] = torch.cat(c.prefill(pool, q, [0, 1, 2], lengths))
        c.same(out[block_size], out[64], f"block size {block_size} against 64, dim {head_dim} {dtype}")
        last = c.decode(pool, torch.stack([x[-1] for x in q]), [0, 1, 2], lengths)
        ends = [sum(lengths[: j + 1]) - 1 for j in range(3)]
        c.same(last, out[64][ends], f"decode, block size {block_size}, dim {head_dim} {dtype}")


def check_batch(c: Checks, heads: tuple[int, int], head_dim: int, longest: int) -> None:
    """256 sequences of random lengths, each row alone and among the others; repeated runs."""
    gen = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (256,), generator=gen).tolist()
    pool = Pool(lengths, heads[1], head_dim, 64, torch.bfloat16)
    q = torch.randn(256, heads[0], head_dim, device=DEVICE).to(torch.bfloat16)
    everyone = list(range(256))
    rows = c.prefill(pool, [q[i : i + 1] for i in everyone], everyone, lengths)
    among = torch.cat(rows)
    name = f"heads {heads[0]}/{heads[1]} dim {head_dim} up to {longest}"
    for _ in range(50):
        c.same(c.decode(pool, q, everyone, lengths), among, f"decode again, {name}")
    for n in (1, 2, 3, 5, 9, 17, 31, 100, 200):
        for at in range(0, 250, 50 if n < 31 else 125):
            some = everyone[at : at + n]
            out = c.decode(pool, q[some], some, [lengths[i] for i in some])
            c.same(out, among[some], f"{len(some)} from {at}, {name}")


def check_long(c: Checks) -> None:
    """One row of 100,000 keys, and a cache past 2^31 elements."""
    pool = Pool([100_000, 5], 2, 64, 64, torch.bfloat16)
    q = torch.randn(2, 8, 64, device=DEVICE).to(torch.bfloat16)
    out = c.decode(pool, q, [0, 1], [100_000, 5])
    for i in (0, 1):
        c.close(out[i : i + 1], reference(q[i : i + 1], pool.keys[i], pool.values[i], 0.125), f"long {i}")
    rows = c.prefill(pool, [q[:1], q[1:]], [0, 1], [100_000, 5])
    c.same(torch.cat(rows), out, "long, prefill of one token")
    del pool
    small = Pool([130], 8, 64, 64, torch.bfloat16)
    count = 2**31 // (2 * 8 * 64 * 64) + 40
    big = torch.empty(count, 2, 8, 64, 64, dtype=torch.bfloat16, device=DEVICE)
    table = small.table.clone()
    slot = int(small.slots[0])
    for j in range(3):
        big[count - 1 - 7 * j] = small.cache[int(table[slot, j])]
        table[slot, j] = count - 1 - 7 * j
    q = torch.randn(130, 32, 64, device=DEVICE).to(torch.bfloat16)
    before = c.prefill(small, [q], [0], [130])[0]
    small.cache, small.table = big, table
    c.same(c.prefill(small, [q], [0], [130])[0], before, "cache past 2^31 elements, prefill")
    c.same(c.decode(small, q[-1:], [0], [130])[0], before[-1], "cache past 2^31 elements, decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--quick", choices=("16", "32"), help="few shapes of so many bits, for compute-sanitizer")
    parser.add_argument("--library", help="what attention_kernels.build made, to save its time")
    options = parser.parse_args()
    began = time.time()
    kernels = Kernels(options.library)
    print(f"built in {time.time() - began:.0f} s", flush=True)
    c = Checks(kernels)
    half = torch.bfloat16
    if options.quick == "32":
        check_shape(c, (6, 2), 20, 16, torch.float32, False)
    elif options.quick:
        check_shape(c, (28, 4), 64, 16, half, False)  # many enough for all decode kernels
        check_shape(c, (8, 2), 128, 64, half, False)
        check_shape(c, (4, 2), 96, 64, half, False)
    else:
        for step in (
            lambda: check_shape(c, (32, 8), 64, 64, half, True),
            lambda: [check_block_sizes(c, dim, half) for dim in (64, 128, 96, 16)],
            lambda: [check_shape(c, (32, 8), dim, 64, half, dim > 64) for dim in (16, 32, 80, 96, 128)],
            lambda: [check_shape(c, heads, 64, 64, half, False) for heads in HEADS],
            lambda: [check_shape(c, (28, 4), 128, size, half, False) for size in (1, 16, 128)],
            lambda: [check_shape(c, (24, 8), 64, size, half, False) for size in (2, 16, 32, 128)],
            lambda: [check_shape(c, (32, 8), dim, 64, torch.float16, False) for dim in (64, 128)],
            lambda: [check_shape(c, (9, 3), dim, 16, torch.float32, False) for dim in (64, 20)],
            lambda: [check_batch(c, (32, 8), dim, n) for dim in (64, 128) for n in (500, 3000)],
            lambda: [check_batch(c, (24, 2), 96, 3000), check_batch(c, (20, 1), 128, 1000)],
            lambda: check_shape(c, (272, 272), 64, 64, torch.bfloat16, False),  # more head tiles than blocks
            lambda: check_long(c),
        ):
            step()
            torch.cuda.synchronize()
            print(f"{time.time() - began:.0f} s: {c.passed} passed, {c.failed} failed", flush=True)
    print({str(k): f"{v:.2e}" for k, v in c.worst.items()})
    print(f"{c.passed} passed, {c.failed} failed in {time.time() - began:.0f} s", flush=True)
    if options.bench:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        import kernels_attention

        kernels_attention.show(kernels)
    sys.exit(c.failed != 0)


if __name__ == "__main__":
    main()
