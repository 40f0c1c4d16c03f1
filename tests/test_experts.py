"""A mixture of experts: experts live on another mesh than the rest, tokens travel to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import ShardPlacementResult, clip_grad_norm_, fully_shard
from harness import Ranks, distributed
from models import assert_idle, whole

EXPERTS = 4


class Exchange(torch.autograd.Function):
    """All-to-all of tokens, ``sent`` to and ``received`` from each rank; backward sends back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        sent, received, group = ctx.sizes
        return Exchange.apply(gradient, received, sent, group), None, None, None


class Expert(nn.Module):
    def __init__(self, dim: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """This rank's experts; all of them where there is no group to exchange tokens with."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor, first: int = 0) -> Tensor:
        out = torch.zeros_like(x)
        for i, member in enumerate(self.members):
            rows = (chosen == first + i).nonzero().squeeze(1)
            if len(rows):  # an expert that gets no token is not called
                out = out.index_add(0, rows, member(x[rows]))
        return out


class MoE(nn.Module):
    """Norm, router, experts. ``chosen`` is given, so that a test can starve an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Linear(6, 1)
        self.experts = Experts()
        self.group: Any = None
        self.first = 0

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y = self.norm(x)
        found = self.experts(y, chosen) if self.group is None else self.dispatched(y, chosen)
        return x + torch.sigmoid(self.gate(y)) * found

    def dispatched(self, y: Tensor, chosen: Tensor) -> Tensor:
        ranks = dist.get_world_size(self.group)
        target = chosen // (EXPERTS // ranks)
        order = torch.argsort(target, stable=True)
        sent = torch.bincount(target, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        there, back = sent.tolist(), received.tolist()
        tokens = Exchange.apply(y[order], there, back, self.group)
        arrived = torch.empty(sum(back), dtype=chosen.dtype)
        dist.all_to_all_single(arrived, chosen[order], back, there, group=self.group)
        results = Exchange.apply(self.experts(tokens, arrived, self.first), back, there, self.group)
        return torch.zeros_like(y).index_copy(0, order, results)


def routes(kind: str, step: int, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    highest = EXPERTS if kind == "all" else EXPERTS - 1  # the last one starves
    return [torch.randint(0, highest, (7,), generator=generator) for _ in range(ranks)]


@distributed(4)
@pytest.mark.parametrize("kind", ["all", "starved"])
@pytest.mark.parametrize("how", ["calls", "placement"])
def test_experts_train_like_the_dense_model(ranks: Ranks, kind: str, how: str) -> None:
    """Two expert-parallel groups of two, each expert sharded over two ranks; 5 steps of AdamW.

    To rounding: a token's gradient is added in another order. An expert that nobody routes to
    keeps its gradient as it was on all its owners: None.
    """
    mesh = ranks.mesh(2, 2, names=("efsdp", "ep"))
    reference = MoE()
    model = copy.deepcopy(reference)
    ep_rank = mesh["ep"].get_local_rank()
    model.group = mesh["ep"].get_group()
    model.first = 2 * ep_rank
    model.experts.members = nn.ModuleList(model.experts.members[model.first : model.first + 2])
    if how == "calls":
        fully_shard(model.experts, mesh=mesh["efsdp"])
        # An expert sees the tokens of all four ranks, and two of them share its rows.
        model.experts.set_gradient_divide_factor(4.0)
        fully_shard(model, mesh=ranks.mesh())
    else:
        mine = set(model.experts.parameters())
        fully_shard(
            model,
            mesh=ranks.mesh(),
            shard_placement_fn=lambda p: (
                ShardPlacementResult(Shard(0), mesh["efsdp"]) if p in mine else None
            ),
        )
        model.set_gradient_divide_factor(4.0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for step in range(5):
        chosen = routes(kind, step, 4)
        inputs = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(100 + step))
        loss = model(inputs[ranks.rank], chosen[ranks.rank]).square().mean()
        loss.backward()
        expected = [reference(x, c).square().mean() for x, c in zip(inputs, chosen)]
        (torch.stack(expected).sum() / 4).backward()
        torch.testing.assert_close(loss, expected[ranks.rank], rtol=1e-5, atol=1e-6)
        theirs = dict(reference.named_parameters())
        for name, param in model.named_parameters():
            if name.startswith("experts.members."):
                index, rest = name.removeprefix("experts.members.").split(".", 1)
                name = f"experts.members.{int(index) + model.first}.{rest}"
            for found, wanted in ((param.grad, theirs[name].grad), (param, theirs[name])):
                torch.testing.assert_close(
                    whole(found), whole(wanted), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m
                )
        norm = clip_grad_norm_(reference.parameters(), 1e9)
        assert norm.isfinite()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_idle(model)
