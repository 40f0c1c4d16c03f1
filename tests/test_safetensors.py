"""Weights go out to Hugging Face's safetensors files and come back, a piece at a time."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp2 import UsageError, fully_shard, load_safetensors, save_safetensors
from harness import Ranks, distributed
from models import Net, assert_idle, assert_same, next_token_loss, shard_blocks, whole

safetensors_torch = pytest.importorskip("safetensors.torch")


class Odd(Net):
    """Tied, with buffers, a scalar, and one parameter that is ignored."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.left_alone = nn.Parameter(torch.randn(3))
        self.register_buffer("steps", torch.tensor([2**40 + 1, -7]))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("cache", torch.randn(4), persistent=False)


def shared_folder(ranks: Ranks) -> Path:
    """An empty folder that all ranks see."""
    found: list[Any] = [tempfile.mkdtemp() if ranks.rank == 0 else None]
    dist.broadcast_object_list(found)
    return Path(found[0])


def read_all(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors_torch.load_file(file)
    return found


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


@distributed(2, 3)
@pytest.mark.parametrize("limit", [10**9, 400], ids=["one file", "several"])
def test_there_and_back(ranks: Ranks, limit: int) -> None:
    """What another library reads is the model, and reading it back gives every shard its rows."""
    reference = Odd()
    expected = {k: v.clone() for k, v in reference.state_dict().items()}
    model = shard_blocks(reference, ignored_params={reference.left_alone})
    next_token_loss(model, torch.ones(2, 5, dtype=torch.int64)).backward()
    folder = shared_folder(ranks)
    steps: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        steps.append((done, total))
        assert not list((folder / "new").glob("model*")), "a kill here leaves no file half written"

    save_safetensors(folder / "new", model, max_file_nbytes=limit, on_progress=note)
    found = read_all(folder / "new")
    assert found.keys() == expected.keys() - {"head.weight"}, "the tied weight once"
    for name, tensor in found.items():
        assert_same(tensor, expected[name], name)
    names = {path.name for path in (folder / "new").iterdir()}
    if limit > 400:
        assert names == {"model.safetensors"}
    else:
        index = json.loads((folder / "new" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
        assert names == {*index["weight_map"].values(), "model.safetensors.index.json"}
        nbytes = sum(tensor.nbytes for tensor in found.values())
        assert index["metadata"]["total_size"] == nbytes
    if ranks.rank == 0:
        assert steps[-1][0] == steps[-1][1] and len(steps) == len(found)
        assert steps == sorted(steps)
    else:
        assert not steps
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.zero_()
    load_safetensors(folder / "new", model)
    for name, tensor in named(model).items():
        assert_same(tensor, expected[name], name)
    assert_idle(model)


@distributed(2)
def test_dtype(ranks: Ranks) -> None:
    """A dtype of choice for what is floating-point; integers keep all their bits."""
    reference = Odd()
    expected = {k: v.clone() for k, v in reference.state_dict().items()}
    model = shard_blocks(reference)
    folder = shared_folder(ranks)
    save_safetensors(folder, model, dtype=torch.bfloat16)
    found = read_all(folder)
    for name, tensor in found.items():
        is_floating = expected[name].is_floating_point()
        assert_same(tensor, expected[name].bfloat16() if is_floating else expected[name], name)
    load_safetensors(folder, model)
    for name, tensor in named(model).items():
        kept = expected[name].dtype
        assert_same(tensor, found.get(name, found["embedding.weight"]).to(kept), name)
    assert_idle(model)


@distributed(2)
def test_each_rank_reads_its_rows(ranks: Ranks) -> None:
    """Slices asked of the files cover this rank's part of every parameter and nothing else."""
    import fsdp2.safetensors_io as room

    model = shard_blocks(Net())
    folder = shared_folder(ranks)
    save_safetensors(folder, model)
    read = 0
    original = room._own_slices

    def counting(tensor: Tensor) -> tuple[slice, ...]:
        nonlocal read
        slices = original(tensor)
        read += torch.Size([s.stop - s.start for s in slices]).numel()
        return slices

    room._own_slices = counting
    try:
        load_safetensors(folder, model)
    finally:
        room._own_slices = original
    assert read == sum(param.to_local().numel() for param in model.parameters())
    assert_idle(model)


@distributed(4)
def test_tensor_parallel(ranks: Ranks) -> None:
    """On a 2x2 mesh, and along another dimension: full tensors out, this rank's part in."""
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    reference = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 7))
    expected = {k: v.clone() for k, v in reference.state_dict().items()}
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(reference, mesh["tp"], plan)
    by_columns = model[2].weight
    fully_shard(
        model,
        mesh=mesh["dp"],
        shard_placement_fn=lambda p: Shard(1) if p is by_columns else None,
    )
    folder = shared_folder(ranks)
    save_safetensors(folder, model)
    for name, tensor in read_all(folder).items():
        assert_same(tensor, expected[name], name)
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_safetensors(folder, model)
    for name, param in model.named_parameters():
        assert_same(param.to_local(), before[name], name)
    assert_idle(model)


@distributed(2, 4)
def test_hybrid(ranks: Ranks) -> None:
    """Replicas all read; the first rank of the mesh alone writes."""
    mesh = ranks.mesh(2, ranks.world_size // 2, names=("replicate", "shard"))
    reference = Net()
    expected = {k: v.clone() for k, v in reference.state_dict().items()}
    model = shard_blocks(reference, mesh=mesh)
    folder = shared_folder(ranks)
    save_safetensors(folder, model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_safetensors(folder, model)
    for name, tensor in named(model).items():
        assert_same(tensor, expected[name], name)
    assert_idle(model)


def lacks_one(tensors: dict[str, Tensor]) -> None:
    del tensors["blocks.1.up.bias"]


def has_one_more(tensors: dict[str, Tensor]) -> None:
    tensors["blocks.2.up.bias"] = torch.ones(1)


def has_another_shape(tensors: dict[str, Tensor]) -> None:
    tensors["norm.bias"] = torch.ones(9)


@distributed(2)
@pytest.mark.parametrize(
    "change, message",
    [
        (lacks_one, r"lacks \['blocks.1.up.bias'\]"),
        (has_one_more, r"has \['blocks.2.up.bias'\]"),
        (has_another_shape, r"'norm.bias' is \(9,\) in the file and \(8,\) in the model"),
    ],
)
def test_what_does_not_fit(
    ranks: Ranks, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    """A missing, unexpected or wrongly shaped tensor is named, and nothing is loaded."""
    model = shard_blocks(Net())
    before = named(model)
    folder = shared_folder(ranks)
    if ranks.rank == 0:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        change(tensors)
        safetensors_torch.save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    with pytest.raises(UsageError, match=message):
        load_safetensors(folder, model)
    for name, tensor in named(model).items():
        assert_same(tensor, before[name], name)
    with pytest.raises(UsageError, match="has neither"):
        load_safetensors(folder / "elsewhere", model)
    assert_idle(model)


@distributed(2)
def test_failed_export(ranks: Ranks) -> None:
    """An export that cannot go on raises on all ranks and leaves the one before as it was."""
    model = shard_blocks(Net())
    folder = shared_folder(ranks)
    save_safetensors(folder, model)
    dist.barrier()
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(done: int, total: int) -> None:
        assert (folder / "model.safetensors").read_bytes() == before, "nothing under its name yet"
        raise OSError(28, os.strerror(28))

    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(OSError):
        save_safetensors(folder, model, on_progress=full_disk)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == before
    assert_idle(model)


@distributed(2)
def test_earlier_export_goes(ranks: Ranks) -> None:
    """Files of an earlier export that had others do not stay to be found first."""
    model = shard_blocks(Net())
    folder = shared_folder(ranks)
    (folder / "config.json").write_text("{}")
    save_safetensors(folder, model)
    save_safetensors(folder, model, max_file_nbytes=1000)
    assert not (folder / "model.safetensors").exists()
    save_safetensors(folder, model)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json"}
    assert_idle(model)


@distributed(2)
def test_refused(ranks: Ranks) -> None:
    """Meta parameters, dtypes without a code, and a model that is not sharded, by name."""
    folder = shared_folder(ranks)
    with pytest.raises(UsageError, match="fully_shard was called on no module of Linear"):
        save_safetensors(folder, nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match="'phase' is torch.complex64"):
        save_safetensors(folder, fully_shard(model))
    plain = fully_shard(nn.Linear(2, 2))
    save_safetensors(folder, plain)
    with torch.device("meta"):
        meta = fully_shard(nn.Linear(2, 2), mesh=ranks.mesh())
    with pytest.raises(UsageError, match="'weight' .* is on the meta device"):
        load_safetensors(folder, meta)
    assert_idle(plain)


# ---- Hugging Face's models


def tiny(kind: str, tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, tie_word_embeddings=tied
    )
    return transformers.GPT2LMHeadModel(config)


@distributed(2)
@pytest.mark.slow
@pytest.mark.parametrize("limit", [10**9, 20_000], ids=["one file", "several"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers(ranks: Ranks, kind: str, tied: bool, limit: int) -> None:
    """`from_pretrained` opens what we wrote, and we read what `save_pretrained` wrote."""
    plain = tiny(kind, tied)
    model = copy.deepcopy(plain)
    for layer in model.model.layers if kind == "llama" else model.transformer.h:
        fully_shard(layer)
    fully_shard(model)
    ours, theirs = shared_folder(ranks), shared_folder(ranks)
    save_safetensors(ours, model, max_file_nbytes=limit)
    if ranks.rank == 0:
        plain.config.save_pretrained(ours)
        opened, report = type(plain).from_pretrained(ours, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        for name, tensor in opened.state_dict().items():
            assert_same(tensor, plain.state_dict()[name], name)
        plain.save_pretrained(theirs, max_shard_size=limit)
    dist.barrier()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_safetensors(theirs, model)
    for name, tensor in named(model).items():
        assert_same(tensor, plain.state_dict()[name], name)
    assert_idle(model)
