"""torchao's float8 training: weights that travel in float8, by its own tensor subclass."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

pytest.importorskip("torchao", reason="pip install -c constraints.txt -e '.[clients]'")

from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.optim import AdamW8bit

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import Ranks, distributed
from models import assert_idle, assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def float8_model(dim: int = 32, hidden: int = 64, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            for _ in range(blocks)
        )
    )
    # "emulate" computes in float32 what a GPU with float8 units would; it runs anywhere.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    converted: Any = convert_to_float8_training(model, config=config)
    return converted


def train(ranks: Ranks, model: Any, shard: Any, precompute: bool, steps: int = 3) -> list[Tensor]:
    policy = MixedPrecisionPolicy()
    for block in model:
        shard(block, mesh=ranks.mesh(), mp_policy=policy)
    shard(model, mesh=ranks.mesh(), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(ranks.rank)
    width = model[0][0].weight.shape[1]
    results = []
    for _ in range(steps):
        loss = (model(torch.randn(8, width)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        results.append(loss.detach())
    weights = [p.to_local() for p in model.parameters()]
    return [*results, *(getattr(w, "_tensor", w).detach() for w in weights)]


@distributed(2)
@pytest.mark.parametrize("precompute", [False, True])
def test_float8_linear_equals_pytorch(ranks: Ranks, precompute: bool) -> None:
    """Losses and shards, bit by bit, also with scales computed for all weights at once."""
    ours_model = float8_model()
    theirs = train(ranks, copy.deepcopy(ours_model), torch_fully_shard, precompute)
    ours = train(ranks, ours_model, fully_shard, precompute)
    for mine, other in zip(ours, theirs):
        assert_same(mine, other)
    assert_idle(ours_model)


@distributed(3)
def test_rows_that_do_not_divide(ranks: Ranks) -> None:
    """64 and 32 rows on three ranks: the full weight is the float8 of the whole weight."""
    model = float8_model()
    whole = [m.weight._tensor.detach().clone() for m in model.modules() if hasattr(m, "config")]
    losses = train(ranks, model, fully_shard, precompute=False, steps=1)
    assert torch.isfinite(torch.stack(losses[:1])).all()
    again = float8_model()
    fully_shard(again, mesh=ranks.mesh())
    again.unshard()
    linears = [m for m in again.modules() if hasattr(m, "config")]
    assert len(linears) == len(whole) == 4
    for linear, weight in zip(linears, whole):
        read = linear.weight.to_original_precision()
        assert read.shape == weight.shape
        # e4m3 has 3 bits behind the point: half a unit is 1/16 of a number, at most.
        assert (read - weight).abs().max() <= weight.abs().max() / 16
    again.reshard()
    assert_idle(again)


@distributed(2)
def test_it_is_named_in_explain(ranks: Ranks) -> None:
    """What travels is the subclass's to say; ``explain`` says so."""
    model = float8_model()
    fully_shard(model, mesh=ranks.mesh())
    text = str(fsdp2.explain(model))
    assert "as WeightWithDynamicFloat8CastTensor says" in text


@distributed(2, 3)
def test_8_bit_optimizer_states(ranks: Ranks) -> None:
    """The unsharded model's numbers, also where rows do not divide."""
    for rows, columns in ((64, 256), (1601, 256)):
        torch.manual_seed(0)
        model = nn.Linear(columns, rows)
        expected = copy.deepcopy(model)
        fully_shard(model, mesh=ranks.mesh())
        pairs = [(each, AdamW8bit(each.parameters(), lr=1e-2)) for each in (model, expected)]
        x = torch.randn(8, columns)
        # Its cache on disk takes the kernels of a rank with 801 rows for those of one with 800.
        caches = torch._inductor.config.patch(force_disable_caches=True)
        with warnings.catch_warnings(), caches:
            warnings.simplefilter("ignore")  # the compiler's, about torchao's classes
            for _ in range(3):
                for each, optimizer in pairs:
                    each(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        (_, ours), (_, theirs) = pairs
        for mine, other in zip(model.parameters(), expected.parameters()):
            kinds = [
                type(getattr(each, "_local_tensor", each))
                for each in (ours.state[mine]["exp_avg"], theirs.state[other]["exp_avg"])
            ]
            assert kinds[0] is kinds[1], (rows, columns, kinds)
            # Blocks of 256 numbers share a scale, and begin where a rank's rows begin.
            torch.testing.assert_close(mine.full_tensor(), other.detach(), rtol=0, atol=2e-3)
