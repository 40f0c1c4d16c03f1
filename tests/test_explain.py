"""`fsdp2.explain`: what each group looks like, which way each parameter travels, and why."""

from __future__ import annotations

import torch
from expecttest import TestCase
from torch import Tensor, nn

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import Ranks, distributed, run
from models import assert_idle


class Mixed(nn.Module):
    """Uneven rows, fewer rows than ranks, a scalar, a large matrix, a frozen float64 one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.large = nn.Linear(5, 12001, bias=False)
        self.frozen = nn.Linear(12001, 1, bias=False, dtype=torch.float64).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.large(self.body(x))
        return self.frozen(wide.to(self.frozen.weight.dtype)) * self.scale


def explanations(ranks: Ranks) -> tuple[str, str]:
    """Before and after the first step, in bf16 with sums in fp32 for the body."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    model = Mixed()
    fully_shard(model.body, mp_policy=policy)
    fully_shard(model)
    fsdp2.set_inflight_limit(model, 3)
    before = str(fsdp2.explain(model))
    model(torch.randn(2, 4)).sum().backward()
    after = str(fsdp2.explain(model))
    assert_idle(model)
    return before, after


def alone(ranks: Ranks) -> str:
    model = fully_shard(nn.Linear(3, 2), reshard_after_forward=False)
    text = str(fsdp2.explain(model))
    assert_idle(model)
    return text


class TestText(TestCase):
    """What a reader sees."""

    maxDiff = None

    def test_mixed_model_on_three_ranks(self) -> None:
        """Every rank explains alike, with full names from the first forward on."""
        texts = run(explanations, 3)
        assert texts == [texts[0]] * 3
        self.assertExpectedInline(
            texts[0][1],
            """\
root: 3 parameters over 3 ranks, kept after forward
  shard 176,064 B, full 624,128 B, padding 192,056 B (36.4%), shared memory, limit 3 in flight
  scale (), rows 1/1/1, torch.float32 -> torch.float32 -> torch.float32
    gather: replicated: it has no rows, so every rank keeps it
    reduction: packed: exchanged in torch.float32, summed in torch.float32, its gradient goes to every rank
  large.weight (12001, 5), rows 4001/4001/3999, torch.float32 -> torch.float32 -> torch.float32
    gather: direct: its shard has 65,536 B or more
    reduction: direct: exchanged in torch.float32, summed in torch.float32, read where autograd left the gradient
  frozen.weight (1, 12001), rows 1/0/0, torch.float64 -> torch.float64 -> frozen
    gather: packed: its shard is below 65,536 B; a message costs about as much as 64 KiB on the wire
    reduction: none: it is frozen
body: 2 parameters over 3 ranks, freed after forward
  shard 48 B, full 128 B, padding 20 B (13.9%), shared memory, limit 3 in flight
  body.weight (5, 4), rows 2/2/1, torch.float32 -> torch.bfloat16 -> torch.float32
    gather: packed after a cast: its shard is below 65,536 B; a message costs about as much as 64 KiB on the wire
    reduction: packed: exchanged in torch.bfloat16, summed in torch.float32, small like its shard
  body.bias (5,), rows 2/2/1, torch.float32 -> torch.bfloat16 -> torch.float32
    gather: packed after a cast: its shard is below 65,536 B; a message costs about as much as 64 KiB on the wire
    reduction: packed: exchanged in torch.bfloat16, summed in torch.float32, small like its shard""",  # noqa: E501
        )

    def test_before_the_first_forward(self) -> None:
        """The root is not known yet: names are types."""
        before, _ = run(explanations, 2)[0]
        headings = "\n".join(line for line in before.splitlines() if line[0] != " ")
        self.assertExpectedInline(
            headings,
            """\
Mixed: 3 parameters over 2 ranks, freed after forward
body: 2 parameters over 2 ranks, freed after forward""",
        )

    def test_one_rank(self) -> None:
        """Nothing is communicated and nothing copied."""
        self.assertExpectedInline(
            run(alone, 1)[0],
            """\
Linear: 2 parameters over 1 rank, kept after forward
  shard 48 B, full 0 B, padding 0 B (0.0%), no communication, limit 2 in flight
  weight (2, 3), rows 2, torch.float32 -> torch.float32 -> torch.float32
    gather: none: one rank, the full parameter is the shard
    reduction: none: one rank
  bias (2,), rows 2, torch.float32 -> torch.float32 -> torch.float32
    gather: none: one rank, the full parameter is the shard
    reduction: none: one rank""",
        )


@distributed(3)
def test_numbers_are_those_of_the_tensors(ranks: Ranks) -> None:
    """Rows, bytes and padding agree with the shards and full parameters that there are."""
    model = Mixed()
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    fully_shard(model.body)
    fully_shard(model)
    model(torch.randn(2, 4)).sum().backward()
    explanation = fsdp2.explain(model)
    assert [group.name for group in explanation.groups] == ["root", "body"]
    found = {param.name: param for group in explanation.groups for param in group.params}
    assert {name: param.shape for name, param in found.items()} == shapes
    for name, param in model.named_parameters():
        report = found[name]
        local = param.to_local()
        rows = local.shape[0] if local.ndim else 1
        assert report.rows_per_rank[ranks.rank] == rows
        assert report.storage_dtype == str(local.dtype)
        if local.ndim:
            assert sum(report.rows_per_rank) == param.shape[0]
            padded = max(report.rows_per_rank) * ranks.world_size
            missing = padded * (param.numel() // param.shape[0]) - param.numel()
            assert report.padding_nbytes == missing * local.element_size()
        else:
            assert report.padding_nbytes == 0
        assert (report.reduce_dtype is None) == (not param.requires_grad)
    for module, group in zip((model, model.body), explanation.groups, strict=True):
        assert group.world_size == ranks.world_size
        assert group.padding_nbytes == sum(param.padding_nbytes for param in group.params)
        module.unshard()
        held = {
            storage.data_ptr(): storage.nbytes()
            for param in fully_shard.state(module).group.params
            for storage in [param.full.untyped_storage()]
        }
        assert sum(held.values()) == group.full_nbytes, "one storage, as large as it says"
        module.reshard()
    assert_idle(model)
