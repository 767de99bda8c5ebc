"""What products with rope and with halves of norms refuse, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows import BLOCK, CUDA, DIM, EPS, matrix, near_one, random
from tensors import angles

from minivllm import ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]


def rope_arguments() -> dict[str, Any]:
    table = torch.arange(8, device=CUDA, dtype=torch.int32).view(2, 4)
    return {
        "rows": ops.weigh_rows(random(4, 2048), near_one(2048)),
        "eps": EPS,
        "cos_sin": angles(DIM, 100, CUDA),
        "positions": torch.arange(4, device=CUDA, dtype=torch.int32),
        "slots": torch.zeros(4, device=CUDA, dtype=torch.int32),
        "block_table": table,
        "kv_cache": torch.full((8, 2, 8, BLOCK, DIM), math.nan, device=CUDA).bfloat16(),
    }


WRONG: list[tuple[str, Callable]] = [
    ("rows", lambda rows: ops.Weighed(rows.x[:, :1024], rows.square_sums)),
    ("rows", lambda rows: ops.Weighed(rows.x, rows.square_sums[:, :16].contiguous())),
    ("rows", lambda rows: ops.Weighed(rows.x, rows.square_sums.double())),
    ("rows", lambda rows: ops.Weighed(rows.x.float(), rows.square_sums)),
    ("cos_sin", lambda cos_sin: cos_sin[:, :32].contiguous()),
    ("positions", lambda positions: positions[:3]),
    ("slots", lambda slots: slots.long()),
    ("slots", lambda slots: slots.cpu()),
    ("block_table", lambda table: table.float()),
    ("kv_cache", lambda cache: cache[..., :32].contiguous()),
    ("kv_cache", lambda cache: cache.half()),
    ("kv_cache", lambda cache: cache.flatten()[1:][: 7 * cache[0].numel()].view(7, *cache.shape[1:])),
    ("cos_sin", lambda cos_sin: cos_sin.flatten()[1:][: 99 * DIM].view(99, DIM)),
]


@pytest.mark.parametrize(("name", "spoil"), WRONG)
def test_rope_kv_refuses(name: str, spoil: Callable) -> None:
    linear, arguments = ops.Linear(matrix(48 * DIM, 2048)), rope_arguments()
    linear.rope_kv(**arguments)
    arguments["kv_cache"].fill_(math.nan)
    arguments[name] = spoil(arguments[name])
    with pytest.raises(ValueError):
        linear.rope_kv(**arguments)
    assert arguments["kv_cache"].isnan().all()


def test_others_refuse() -> None:
    linear, norm = ops.Linear(matrix(2048, 2048)), near_one(2048)
    x, residual = random(4, 2048), random(4, 2048)
    for given, match in [
        ((residual[:3], x, norm), "residual"),
        ((residual, x[:, :1024], norm), "weight"),
        ((residual, x, norm[:1024]), "norm_weight"),
        ((residual, x, norm.float()), "norm_weight"),
        ((residual.float(), x, norm), "residual"),
        ((residual, x, norm.cpu()), "norm_weight"),
        ((residual, x, near_one(2049)[1:]), "16 bytes"),
    ]:
        before = given[0].clone()
        with pytest.raises(ValueError, match=match):
            linear.add_and_weigh(*given)
        assert torch.equal(given[0], before)
    with pytest.raises(ValueError, match="more than 64"):
        ops.Linear(matrix(2048, 576)).add_and_weigh(random(65, 2048), random(65, 576), norm)
    rows = ops.weigh_rows(residual, norm)
    for sums in (rows.square_sums[:3], rows.square_sums.bfloat16(), rows.square_sums.cpu(), rows.square_sums[:, ::2]):
        with pytest.raises(ValueError, match="square_sums"):
            linear(rows.x, square_sums=sums, eps=EPS)
    narrow = ops.Linear(matrix(96, 2048))
    with pytest.raises(ValueError, match="96 columns"):
        narrow.add_and_weigh(random(4, 96), x, near_one(96))
    floats = ops.Linear(matrix(2048, 2048).float())
    with pytest.raises(ValueError, match="Hopper"):
        floats.add_and_weigh(residual.float(), x.float(), norm.float())
    with pytest.raises(ValueError, match="Hopper"):
        floats(x.float(), square_sums=rows.square_sums, eps=EPS)
    for given, match in [
        ((random(4, 2048, dtype=torch.float32), norm.float()), "bfloat16"),
        ((random(4, 2000), near_one(2000)), "2000 columns"),
        ((random(4, 16448), near_one(16448)), "16384"),
        ((residual, norm[:64]), "weight"),
        ((residual, near_one(2049)[1:]), "16 bytes"),
        ((residual, norm, torch.zeros(2, 3, 2048, device=CUDA)), "partials"),
        ((residual[:, ::2], norm[:1024]), "contiguous"),
    ]:
        with pytest.raises(ValueError, match=match):
            ops.weigh_rows(*given)
    ids = torch.zeros(4, dtype=torch.int32, device=CUDA)
    table = random(9, 2048)
    for given, match in [
        ((table.float(), norm.float(), ids), "bfloat16"),
        ((table, norm[:64], ids), "norm_weight"),
        ((table, norm, ids.long()), "token_ids"),
        ((table, norm, ids, None, ids), "slots"),
        ((random(9 * 2048 + 1)[1:].view(9, 2048), norm, ids), "16 bytes"),
    ]:
        with pytest.raises(ValueError, match=match):
            ops.embed_and_weigh(*given)
