"""`torch.compile` of sharded modules: the numbers of eager, graphs that stay, breaks we know of.

What is compiled is counted by a backend that runs the captured graph as it is, so results are
equal bit by bit. After the second step nothing may compile again.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import fully_shard
from fsdp2.hooks import states_below
from harness import Ranks, distributed
from models import Block, assert_idle, assert_same, assert_same_params, data_parallel, shard_blocks


@dataclass
class Graphs:
    """A compiler's backend that changes nothing and keeps what it was given."""

    found: list[GraphModule] = field(default_factory=list)

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.found.append(graph)
        return graph.forward

    def __len__(self) -> int:
        return len(self.found)


@contextmanager
def compiling() -> Iterator[Graphs]:
    """A fresh compiler, and none left behind for the tests that follow in the process."""
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings():
        # The compiler looks at `grad` of activations, and inductor imports deprecated code.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        try:
            yield Graphs()
        finally:
            torch.compiler.reset()


class Stack(nn.Module):
    """Blocks in a loop, and a projection that belongs to the root."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Line(nn.Module):
    """The same without a loop, and with some work of the root between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x * 2) + 1)
        return self.out(self.third(x))


def shard_line(model: Line) -> Any:
    for block in (model.first, model.second, model.third):
        fully_shard(block)
    return fully_shard(model)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches(world_size: int, steps: int = 4, rows: int = 3) -> list[list[Tensor]]:
    """For every step one input for each rank, alike wherever it is called."""
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randn(rows, 8, generator=generator) for _ in range(world_size)] for _ in range(steps)
    ]


def wrap(model: Any, **compiled: Any) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **compiled)
    return model


def in_place(model: Any, **compiled: Any) -> Any:
    for block in model.blocks:
        block.compile(**compiled)
    return model


def wrap_then_shard(model: Any, compiled: dict[str, Any], **options: Any) -> Any:
    return shard_blocks(wrap(model, **compiled), **options)


def compile_then_shard(model: Any, compiled: dict[str, Any], **options: Any) -> Any:
    return shard_blocks(in_place(model, **compiled), **options)


def shard_then_wrap(model: Any, compiled: dict[str, Any], **options: Any) -> Any:
    return wrap(shard_blocks(model, **options), **compiled)


def shard_then_compile(model: Any, compiled: dict[str, Any], **options: Any) -> Any:
    return in_place(shard_blocks(model, **options), **compiled)


def shard_then_whole(model: Any, compiled: dict[str, Any], **options: Any) -> Any:
    model = shard_blocks(model, **options)
    model.compile(**compiled)
    return model


BLOCKS = (wrap_then_shard, compile_then_shard, shard_then_wrap, shard_then_compile)


def assert_same_values(model: nn.Module, reference: nn.Module, **bound: float) -> None:
    """Values and gradients alike, whatever `torch.compile` calls the parameters."""
    bound = bound or {"rtol": 0, "atol": 0}
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        plain = expected.pop(name.replace("_orig_mod.", ""))
        torch.testing.assert_close(param.detach().full_tensor(), plain.detach(), **bound)
        assert (param.grad is None) == (plain.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), plain.grad, **bound)
    assert not expected


def train_like(
    reference: nn.Module,
    model: Any,
    ranks: Ranks,
    graphs: Graphs | None = None,
    inputs: list[list[Tensor]] | None = None,
    **bound: float,
) -> None:
    """Train both with SGD: equal in every step, and no graph is new after the second."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    known = 0
    for step, each in enumerate(inputs or batches(ranks.world_size)):
        # From the third step on a compilation raises.
        stance = "fail_on_recompile" if step >= 2 else "default"
        with torch.compiler.set_stance(stance):
            loss = square(model, each[ranks.rank])
            loss.backward()
        losses = data_parallel(reference, each, square)
        torch.testing.assert_close(
            loss.detach(), losses[ranks.rank], **(bound or {"rtol": 0, "atol": 0})
        )
        assert_same_values(model, reference, **bound)
        assert_idle(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if graphs is not None:
            assert step < 2 or len(graphs) == known, f"step {step} compiled again"
            known = len(graphs)


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("how", [*BLOCKS, shard_then_whole])
def test_same_numbers_and_no_recompilation(
    ranks: Ranks, how: Callable[..., Any], reshard: bool | None
) -> None:
    """Compiled before or after sharding, in place or wrapped: bit by bit as unsharded.

    All blocks share two graphs, that of the first one, whose input needs no gradient, and that
    of the others. Compiling the whole model comes to the same: its own loop stays as it is.
    """
    with compiling() as graphs:
        reference = Stack(*(Block() for _ in range(10)))  # more than the compiler's limit of 8
        compiled = {"backend": graphs}
        model = how(copy.deepcopy(reference), compiled, reshard_after_forward=reshard)
        train_like(reference, model, ranks, graphs)
        assert len(graphs) == 2
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("how", BLOCKS)
def test_blocks_are_full_graphs(ranks: Ranks, how: Callable[..., Any]) -> None:
    """A sharded block without sharded modules inside compiles without a break."""
    with compiling() as graphs:
        reference = Stack(Block(), Block())
        model = how(copy.deepcopy(reference), {"backend": graphs, "fullgraph": True})
        train_like(reference, model, ranks, graphs)
    assert_idle(model)


def linears_in(graph: GraphModule) -> int:
    return sum(node.target is nn.functional.linear for node in graph.graph.nodes)


@distributed(2)
def test_breaks_of_a_whole_model(ranks: Ranks) -> None:
    """A compiled module breaks once at each call of a sharded module in it, nowhere else.

    Three calls, so four parts of the root's forward, of which the one between the second and
    the third has nothing to compute; and two graphs that the blocks share.
    """
    with compiling() as graphs:
        reference = Line()
        model = shard_line(copy.deepcopy(reference))
        model.compile(backend=graphs)
        train_like(reference, model, ranks, graphs)
        assert [linears_in(graph) for graph in graphs.found] == [0, 2, 0, 2, 1]
        assert sum(counters["graph_break"].values()) == 3
    assert_idle(model)


@distributed(2)
def test_full_graph_of_a_whole_model_is_refused(ranks: Ranks) -> None:
    """`fullgraph=True` around sharded modules raises PyTorch's error, with our reason in it."""
    with compiling() as graphs:
        model = shard_blocks(Stack(Block(), Block()))
        whole = torch.compile(model, backend=graphs, fullgraph=True)
        with pytest.raises(Exception, match="fsdp2 gathers and frees parameters between graphs"):
            whole(torch.ones(3, 8))
    model.reset_iter_state()
    assert_idle(model)


@distributed(2)
def test_training_step(ranks: Ranks) -> None:
    """A compiled function that calls forward, backward and nothing of ours traces none of it."""
    with compiling() as graphs:
        reference = Line()
        model = shard_line(copy.deepcopy(reference))

        @torch.compile(backend=graphs)
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        for number, inputs in enumerate(batches(ranks.world_size)):
            stance = "fail_on_recompile" if number >= 2 else "default"
            with torch.compiler.set_stance(stance):
                loss = step(inputs[ranks.rank])
            assert_same(loss, data_parallel(reference, inputs, square)[ranks.rank])
            assert_same_params(model, reference)
            assert_idle(model)
        assert sum(counters["graph_break"].values()) == 1 + 3 + 1, "root, blocks, backward"
    assert_idle(model)


# ---- With what else is on


@distributed(2)
@pytest.mark.parametrize("before", [True, False])
def test_mixed_precision(ranks: Ranks, before: bool) -> None:
    """Compiled blocks compute in the policy's dtype, as the same blocks do uncompiled."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with compiling() as graphs:
        model, eager = Stack(Block(), Block()), Stack(Block(), Block())
        eager.load_state_dict(model.state_dict())
        if before:
            in_place(model, backend=graphs)
        for m in (model, eager):
            for block in m.blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(m, mp_policy=replace(policy, output_dtype=torch.float32))
        if not before:
            in_place(model, backend=graphs)
        for step, inputs in enumerate(batches(ranks.world_size)):
            with torch.compiler.set_stance("fail_on_recompile" if step >= 2 else "default"):
                losses = [square(m, inputs[ranks.rank]) for m in (model, eager)]
                for loss in losses:
                    loss.backward()
            assert_same(*losses)
            assert_same_params(model, eager)
            assert_idle(model)
        assert len(graphs) == 2
    assert_idle(model)


class Remembering(nn.Module):
    """Runs its block again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = Block()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@distributed(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpointing_inside(ranks: Ranks, backend: str) -> None:
    """Checkpointing that is compiled with its block: recomputation is part of the graph."""
    with compiling():
        reference = Stack(Remembering(False), Remembering(False))
        compiled = {"backend": backend, "fullgraph": True}
        model = compile_then_shard(copy.deepcopy(reference), compiled)
        train_like(reference, model, ranks)
        with fsdp2.trace(model) as events:
            square(model, torch.ones(3, 8)).backward()
        gathered = [event.group for event in events.events if event.name == "gather"]
        assert gathered.count("blocks.0") == 2
    assert_idle(model)


class Around(Stack):
    """Checkpoints each of its blocks."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = x.clone().requires_grad_()  # which that form asks for
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


@distributed(2)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensors"])
@pytest.mark.parametrize("how", BLOCKS)
def test_checkpointing_around(ranks: Ranks, how: Callable[..., Any], reentrant: bool) -> None:
    """A checkpointed block runs its graphs again in backward."""
    with compiling() as graphs:
        reference = Around(Block(), Block())
        reference.reentrant = reentrant
        model = how(copy.deepcopy(reference), {"backend": graphs})
        train_like(reference, model, ranks, graphs)
    assert_idle(model)


@distributed(2)
def test_accumulation(ranks: Ranks) -> None:
    """Gradients kept back for two of three microbatches come out as one backward's."""
    with compiling() as graphs:
        model = Stack(Block(), Block())
        eager = shard_blocks(copy.deepcopy(model))
        model = compile_then_shard(model, {"backend": graphs})
        for step in range(3):
            with torch.compiler.set_stance("fail_on_recompile" if step >= 2 else "default"):
                for m in (model, eager):
                    for micro, inputs in enumerate(batches(ranks.world_size, steps=3)):
                        m.set_requires_gradient_sync(micro == 2)
                        square(m, inputs[ranks.rank]).backward()
            assert_same_params(model, eager)
            assert_idle(model)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("how", [shard_then_wrap, compile_then_shard, shard_then_whole])
@pytest.mark.parametrize("reshard", [True, False])
def test_evaluation_between_steps(ranks: Ranks, how: Callable[..., Any], reshard: bool) -> None:
    """Switching to evaluation without gradients and back adds its graph once."""
    with compiling() as graphs:
        reference = Stack(Block(), nn.Sequential(Block(), nn.Dropout(0.5)))
        reference.blocks[1][1].p = 0.0  # switched by train() and eval(), with numbers to compare
        compiled = {"backend": graphs}
        model = how(copy.deepcopy(reference), compiled, reshard_after_forward=reshard)
        x = batches(ranks.world_size)[0]
        known = 0
        for turn in range(4):
            with torch.compiler.set_stance("fail_on_recompile" if turn >= 2 else "default"):
                for m in (model, reference):
                    m.zero_grad()
                    m.train()
                square(model, x[ranks.rank]).backward()
                for m in (model, reference):
                    m.eval()
                with torch.no_grad():
                    assert_same(model(x[0]), reference(x[0]))
            data_parallel(reference, x, square)
            assert_same_values(model, reference)
            assert turn < 2 or len(graphs) == known
            known = len(graphs)
    for state in states_below(model):
        state.reshard()  # kept by the last forward, where no backward frees it
    assert_idle(model)


@distributed(2)
def test_batch_sizes(ranks: Ranks) -> None:
    """The second batch size makes one graph for all that follow: one for each class of shapes."""
    sizes = [3, 5, 4, 7, 6, 9]
    inputs = [batches(ranks.world_size, steps=1, rows=rows)[0] for rows in sizes]
    with compiling() as graphs:
        reference = Stack(Block(), Block(), Block())
        model = compile_then_shard(copy.deepcopy(reference), {"backend": graphs})
        train_like(reference, model, ranks, graphs, inputs)
        assert len(graphs) == 4, "first block and others, of fixed and of any size"
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("how", [compile_then_shard, shard_then_compile])
def test_frozen(ranks: Ranks, how: Callable[..., Any]) -> None:
    """Frozen parameters, and a block of them alone, get no gradient; thawing compiles once."""
    with compiling() as graphs:
        reference = Stack(Block(), Block(), Block())
        reference.blocks[0].requires_grad_(False)
        reference.blocks[1].up.weight.requires_grad_(False)
        model = how(copy.deepcopy(reference), {"backend": graphs})
        train_like(reference, model, ranks, graphs)
        for m in (reference, model):
            m.get_parameter("blocks.1.up.weight").requires_grad_()
        train_like(reference, model, ranks, graphs)
    assert_idle(model)


# ---- Compilers that change the graph


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", [wrap_then_shard, shard_then_whole])
def test_backward_that_is_compiled(ranks: Ranks, how: Callable[..., Any], reshard: bool) -> None:
    """What a compiled backward saved is freed with the group and read after the next gather."""
    with compiling():
        reference = Stack(Block(), Block(), Block())
        options = {"reshard_after_forward": reshard}
        model = how(copy.deepcopy(reference), {"backend": "aot_eager"}, **options)
        train_like(reference, model, ranks)
    assert_idle(model)


@distributed(4)
@pytest.mark.slow
def test_parts_kept_after_forward(ranks: Ranks) -> None:
    """Backward's gather over two of four ranks brings a compiled backward what it saved."""
    with compiling():
        reference = Stack(Block(), Block())
        compiled = {"backend": "aot_eager"}
        model = compile_then_shard(copy.deepcopy(reference), compiled, reshard_after_forward=2)
        train_like(reference, model, ranks)
    assert_idle(model)


@distributed(2, timeout=400.0)
@pytest.mark.slow
@pytest.mark.parametrize("how", [compile_then_shard, shard_then_whole])
def test_inductor(ranks: Ranks, how: Callable[..., Any]) -> None:
    """The default backend: the same numbers but for the order of sums inside its kernels."""
    with compiling():
        reference = Stack(Block(), Block(), Block())
        model = how(copy.deepcopy(reference), {})
        train_like(reference, model, ranks, rtol=1e-5, atol=1e-6)
    assert_idle(model)


# ---- The page


PAGE = (Path(__file__).parent.parent / "docs" / "compile.md").read_text()


@distributed(2)
def test_snippets(ranks: Ranks) -> None:
    """The page's snippets run as they are written, but for a backend that generates no code."""
    snippets = re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in snippets] == ["blocks", "strict"]
    assert PAGE.count("```python") == len(snippets)
    model = Stack(Block(), Block(), Block())
    with compiling() as graphs:
        inputs = [each[ranks.rank] for each in batches(ranks.world_size)]
        names = {"model": model, "batches": inputs, "graphs": graphs}
        for name, code in snippets:
            code = code.replace("fullgraph=True", "fullgraph=True, backend=graphs")
            exec(compile(code, f"docs/compile.md: {name}", "exec"), names)
        assert len(graphs) == 2
    assert_idle(model)
