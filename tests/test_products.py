"""Products of any shape and stride: a row's bits follow from the row alone, nothing outside the output is touched."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import reference
import torch
from engines import greedy, tiny_engine
from tensors import assert_near, in_double, rand
from torch import Tensor

from minivllm import bench, ops
from minivllm.cli import build_parser, main
from minivllm.commands.options import make_engine
from minivllm.request import RequestError

CUDA = torch.device("cuda")
NUM_ROWS = [1, 2, 3, 7, 8, 16, 17, 64, 65, 200, 1000]
# Inputs and outputs in multiples of 64, of 8, of 4 and of nothing; less than a tile, and more.
SHAPES = [(576, 576), (132, 264), (100, 1000), (36, 100), (50, 33), (2, 1)]
MODEL_SHAPES = [(2048, 2048), (2052, 1992), (8192, 2056), (1004, 4097)]
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def spread(x: Tensor, odd: bool) -> tuple[Tensor, Tensor]:
    """Return x with NaN around its rows, an odd number of elements apart or a multiple of 8, and all of that."""
    rows, columns = x.shape
    width, offset = (columns + 13 - columns % 2, 3) if odd else (columns + 24 - columns % 8, 8)
    wide = torch.full((rows + 1, width), math.nan, dtype=x.dtype, device=x.device)
    inside = wide[:-1, offset : offset + columns]
    return inside.copy_(x), wide


def check_rows(device: torch.device, dtype: torch.dtype, n: int, k: int) -> None:
    weight = rand(n, k, dtype=dtype, device=device) / math.sqrt(k)
    bias = rand(n, dtype=dtype, device=device)
    plain, biased, gated = ops.Linear(weight), ops.Linear(weight, bias), ops.Linear(weight, bias, gate_up=True)
    x, residual = rand(1000, k, dtype=dtype, device=device), rand(1000, n, dtype=dtype, device=device)

    def products(rows: Tensor) -> list[Tensor]:
        some = x[rows]
        added = plain(some, residual=residual[rows])
        return [plain(some), biased(some), gated(some), added, plain(some, out_dtype=torch.float32)]

    everything = torch.arange(1000, device=device)
    whole = products(everything)
    for found, inputs, gate_up in zip(
        whole,
        [(x, weight), (x, weight, bias), (x, weight, bias), (x, weight, None, residual), (x, weight)],
        [False, False, True, False, False],
        strict=True,
    ):
        truth = reference.linear(*in_double(*inputs), gate_up=gate_up)
        assert_near(found, truth, reference.linear(*inputs, gate_up=gate_up))
    for count in NUM_ROWS:
        rows = torch.randperm(1000)[:count].to(device)
        for found, expected in zip(products(rows), whole, strict=True):
            assert torch.equal(found, expected[rows]), count


@dtypes
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number(device, dtype, n, k):
    check_rows(device, dtype, n, k)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(("n", "k"), MODEL_SHAPES)
def test_rows_of_a_model_s_shapes(dtype, n, k):
    check_rows(CUDA, dtype, n, k)


@dtypes
@pytest.mark.parametrize("rows", [1, 9, 70, 300])
@pytest.mark.parametrize(("n", "k"), [(192, 2048), (64, 64), (130, 192), (34, 50)])
def test_strides_change_no_bits_and_nothing_outside_is_touched(device, dtype, rows, n, k):
    layer = ops.Linear(rand(n, k, dtype=dtype, device=device) / math.sqrt(k))
    x, residual = rand(rows, k, dtype=dtype, device=device), rand(rows, n, dtype=dtype, device=device)
    expected, added = layer(x), layer(x, residual=residual.clone())
    for odd in (True, False):
        strided, _ = spread(x, odd)
        assert torch.equal(layer(strided), expected)
        out, room = spread(residual, odd)
        assert layer(strided, residual=out) is out
        assert torch.equal(out, added)
        layer(x, out=out)
        assert torch.equal(out, expected)
        assert room.isfinite().sum() == rows * n


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (1024, 1984)])
def test_the_kernels_for_hopper_and_for_every_card_walk_the_same_chains(dtype, n, k):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this card has one of the two")
    layer = ops.Linear(rand(n, k, dtype=dtype, device=CUDA) / math.sqrt(k))
    assert layer.num_chunks == (4 if k == 2048 else 1)
    for rows in (1, 16, 32, 64, 200, 2000):
        x = rand(rows, k, dtype=dtype, device=CUDA)
        out, _ = spread(torch.zeros(rows, n, device=CUDA), True)  # the kernel for Hopper cannot write there
        assert torch.equal(layer(x, out=out, out_dtype=torch.float32), layer(x, out_dtype=torch.float32)), rows


@dtypes
def test_a_product_that_need_not_be_exact(device, dtype):
    n, k = 256, 192
    weight, bias = rand(n, k, dtype=dtype, device=device) / math.sqrt(k), rand(n, dtype=dtype, device=device)
    for given, gate_up in ((None, False), (bias, False), (bias, True)):
        layer = ops.Linear(weight, given, gate_up=gate_up, exact=False)
        exact = ops.Linear(weight, given, gate_up=gate_up)
        for rows in (1, 1024, 1025):
            x = rand(rows, k, dtype=dtype, device=device)
            residual = None if gate_up else rand(rows, n, dtype=dtype, device=device)
            inputs = (x, weight, given, residual)
            truth = reference.linear(*in_double(*inputs), gate_up=gate_up)
            plain = reference.linear(*inputs, gate_up=gate_up)
            found = layer(x, residual=None if residual is None else residual.clone())
            assert_near(found, truth, plain)
            if device.type == "cpu":
                assert torch.equal(found, exact(x, residual=residual))
            if not gate_up:
                out = torch.empty(rows, n, dtype=torch.float32, device=device)
                assert layer(x, out=out, out_dtype=torch.float32) is out
                plain = reference.linear(x.float(), weight.float(), None if given is None else given.float())
                assert_near(out, reference.linear(*in_double(x, weight, given)), plain)


def test_an_engine_that_need_not_be_exact(path, device):
    prompts = [[5, 6, 7], list(range(4, 60))]
    answers = []
    for exact in (True, False):
        with tiny_engine(path, device, exact=exact) as engine:
            answers.append([g.token_ids for g in engine.generate(prompts, greedy(8))])
            layer = engine._runner.model.layers[0]
            assert (layer.o.most_rows < 2**31) == (device.type == "cuda" and not exact)
    assert [len(tokens) for tokens in answers[1]] == [8, 8]
    if device.type == "cpu":
        assert answers[0] == answers[1]


def test_no_product_of_the_cpu_has_half_a_norm_or_rope():
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    layer = ops.Linear(rand(192, 64, dtype=dtype, device=cpu))
    square = ops.Linear(rand(64, 64, dtype=dtype, device=cpu))
    x, norm, sums = rand(3, 64, dtype=dtype, device=cpu), rand(64, dtype=dtype, device=cpu), torch.ones(3, 1)
    residual, cache = x.clone(), torch.zeros(1, 2, 1, 16, 64, dtype=dtype)
    places = [torch.zeros(3, dtype=torch.int32)] * 2
    with pytest.raises(ValueError, match="weigh_rows is for CUDA"):
        ops.weigh_rows(residual, norm)
    with pytest.raises(ValueError, match="weigh_rows is for CUDA"):
        ops.weigh_rows(residual, norm, torch.ones(2, 3, 64))
    with pytest.raises(ValueError, match="embed_and_weigh is for CUDA"):
        ops.embed_and_weigh(square.weight.view(64, 64), norm, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="square_sums is for CUDA"):
        layer(x, square_sums=sums, eps=1e-5)
    with pytest.raises(ValueError, match="linear_residual_norm is for CUDA"):
        square.add_and_weigh(residual, x, norm)
    with pytest.raises(ValueError, match="linear_rope_kv is for CUDA"):
        rows, table = ops.Weighed(x, sums), torch.zeros(1, 1, dtype=torch.int32)
        layer.rope_kv(rows, 1e-5, torch.zeros(16, 64), *places, table, cache)
    assert torch.equal(residual, x)
    assert (cache == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_on_the_cpu_is_not_fused(path, dtype):
    with tiny_engine(path, torch.device("cpu"), dtype=dtype) as engine:
        model = engine._runner.model
        assert model.fused is False
        assert not any(linear.uses_wgmma for layer in model.layers for linear in (layer.qkv, layer.o, layer.down))
        model.fused = True  # the choice is what keeps the CPU away from kernels that it does not have
        with pytest.raises(RequestError, match="embed_and_weigh is for CUDA"):
            engine.generate([[5, 6, 7]], greedy(2))


def test_what_a_product_cannot_do_is_refused(device):
    weight, x = rand(8, 16, dtype=torch.bfloat16, device=device), rand(3, 16, dtype=torch.bfloat16, device=device)
    out = torch.zeros(3, 8, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="out_dtype is for plain products"):
        ops.Linear(weight)(x, residual=out, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="out_dtype is for plain products"):
        ops.Linear(weight, gate_up=True)(x, out_dtype=torch.float32)
    gated = ops.Linear(weight, gate_up=True)
    for most_rows in (gated.most_rows, 0):  # by our kernels, and by torch
        gated.most_rows = most_rows
        with pytest.raises(ValueError, match="gate_up has no residual"):
            gated(x, residual=out)
    with pytest.raises(ValueError, match=r"out is torch\.bfloat16"):
        ops.Linear(weight)(x, out=out, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="no other residual"):
        ops.rms_norm(x, x[0].clone(), 1e-5, residual=x.clone(), partials=torch.zeros(2, 3, 16, device=device))
    assert (out == 0).all()


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_the_flag_reaches_the_engine(monkeypatch, command):
    given = []
    monkeypatch.setattr("minivllm.engine.BatchEngine", lambda model, **how: given.append(how["exact"]))
    for flags in ([], ["--no-exact"]):
        make_engine(build_parser().parse_args([command, "MODEL", "--device", "cpu", *flags]))
    assert given == [True, False]


def test_figures_say_whether_they_were_exact(path, monkeypatch, tmp_path):
    given = []

    def run(path, names, runs, device, told, *, exact):
        given.append(exact)
        told("start", {"s": 1.0, "runs": [1.0], "import_s": 0.5, "engine_s": 0.5})

    monkeypatch.setattr(bench, "run_minivllm", run)
    for flags in ([], ["--no-exact"]):
        how = ["bench", str(path), "--device", "cpu", "--output", str(tmp_path / "figures.json"), *flags]
        assert main(how) == 0
        assert json.loads((tmp_path / "figures.json").read_text())["engine"] == bench.engine_name(given[-1])
    assert given == [True, False] and bench.engine_name(True) != bench.engine_name(False)


@pytest.mark.parametrize("exact", [True, False])
def test_the_start_is_measured_of_the_same_engine(monkeypatch, exact):
    given = []

    def start(command, **_):
        code = command[command.index("-c") + 1].replace("from minivllm import BatchEngine", "")
        monkeypatch.setattr("sys.argv", ["-c", *command[command.index("-c") + 2 :]])
        exec(code, {"BatchEngine": lambda model, **how: given.append((model, how["exact"]))})
        return SimpleNamespace(returncode=0, stdout="1 2", stderr="")

    monkeypatch.setattr(bench.subprocess, "run", start)
    figures = bench.run_minivllm("MODEL", ["start"], 1, "cpu", lambda *_: None, exact=exact)
    assert given == [("MODEL", exact)] and figures["start"]["s"] == 3
