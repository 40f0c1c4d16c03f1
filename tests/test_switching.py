"""The snippets of docs/switching.md run as they are written, and do what the page says.

A snippet is a fenced block behind ``<!-- name -->``. It runs on two gloo ranks in the names of
`Scene`, and its check looks at what it left. A ``diff`` is two programs: what the page removes is
run too where its library is installed, and must train the same parameters.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import FSDPModule
from harness import Ranks, distributed
from models import assert_idle, data_parallel, whole

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "switching.md").read_text()
BLOCK = re.compile(r"(?:<!-- ([\w ]+) -->\n)?```(python|diff)\n(.*?)```", re.DOTALL)
SNIPPETS = {name: (language, code) for name, language, code in BLOCK.findall(PAGE)}
DIFFS = [name for name, (language, _) in SNIPPETS.items() if language == "diff"]
LIBRARIES = {
    "accelerate": ("accelerate", "transformers"),
    "trainer": ("accelerate", "transformers"),
    "lightning": ("lightning",),
}
"""Snippets that need a library, and what they import."""

VOCABULARY = 11

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the snippets leave the mesh to fully_shard, which takes the GPU; the ranks have gloo",
)


class Block(nn.Module):
    """Pre-norm and residual; notes the dtypes that it meets."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 12)
        self.down = nn.Linear(12, dim)
        self.register_buffer("scale", torch.ones(dim))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        self.seen = {"x": x.dtype, "positions": positions.dtype, "up": self.up.weight.dtype}
        x = x + torch.sin(positions).to(x.dtype)
        return x + self.down(F.gelu(self.up(self.norm(x * self.scale.to(x.dtype)))))


class Model(nn.Module):
    """Tokens in, logits out; its head computes in its own parameter's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.seen = torch.float32

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        positions = torch.arange(tokens.shape[1], dtype=torch.float32).unsqueeze(-1)
        for block in self.blocks:
            x = block(x, positions=positions)
        self.seen = self.head.weight.dtype
        return self.head(x.to(self.seen))

    def penalty(self) -> Tensor:
        return self.head.weight.square().sum()


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, VOCABULARY, (3, 5), generator=generator) for _ in range(2)]


def labelled_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Most targets of rank 0 do not count, and none of its second micro-batch."""
    tokens = batches_of(rank)
    targets = [each.roll(-1, 1) for each in tokens]
    if rank == 0:
        targets[0][:, 1:] = -100
        targets[1][:] = -100
    return list(zip(tokens, targets))


SHARD_FIRST = """
from fsdp2 import fully_shard
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
"""

SHARD_HYBRID = """
from fsdp2 import fully_shard
for block in model.blocks:
    fully_shard(block, mesh=hybrid_mesh)
fully_shard(model, mesh=hybrid_mesh)
"""

SHARD_HALF = """
from fsdp2 import MixedPrecisionPolicy, fully_shard
half = MixedPrecisionPolicy(param_dtype=torch.float16)
for block in model.blocks:
    fully_shard(block, mp_policy=half)
fully_shard(model, mp_policy=half)
"""


class Scene:
    """The names that a snippet finds, and what it is compared with."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks = ranks
        self.names: dict[str, Any] = {
            "torch": torch,
            "nn": nn,
            "dist": dist,
            "Block": Block,
            "make_model": make_model,
            "model": make_model(),
            "loss_of": loss_of,
            "batches": batches_of(ranks.rank),
            "labelled": labelled_of(ranks.rank),
            "device": "cpu",
            "world_size": ranks.world_size,
            "nodes": ranks.world_size,
            "ranks_per_node": 1,
            "folder": str(folder),
        }

    @property
    def model(self) -> Any:
        return self.names["model"]

    def run(self, code: str, name: str = "set-up") -> None:
        exec(compile(code, f"docs/switching.md: {name}", "exec"), self.names)

    def shard(self, how: str = SHARD_FIRST) -> None:
        self.run(how)
        self.names["optimizer"] = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def is_sharded(self, *names: str) -> bool:
        """Whether exactly these modules were given to fully_shard."""
        modules = self.model.named_modules()
        return {name for name, m in modules if isinstance(m, FSDPModule)} == set(names)

    def trains(self) -> bool:
        """A backward gives the gradients of data parallelism."""
        self.model.zero_grad()
        loss_of(self.model, self.names["batches"][0]).backward()
        reference = copy_of(self.model)
        data_parallel(reference, [batches_of(r)[0] for r in range(self.ranks.world_size)], loss_of)
        assert_idle(self.model)
        return same_gradients(self.model, reference)


def copy_of(model: nn.Module) -> Model:
    """The plain model with the same full parameters."""
    plain = make_model()
    full = {name: whole(value) for name, value in model.state_dict().items()}
    plain.load_state_dict(full)
    return plain


def same_gradients(model: nn.Module, reference: nn.Module, **bound: float) -> bool:
    """Of the same parameters. Sums are made in different orders: the default bounds of torch."""
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            whole(param.grad), expected[name].grad, msg=lambda m, n=name: f"{n}: {m}", **bound
        )
    return True


def same_parameters(model: nn.Module, reference: nn.Module, **bound: float) -> bool:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            whole(param), whole(expected[name]), msg=lambda m, n=name: f"{n}: {m}", **bound
        )
    return True


def accumulated(ranks: Ranks) -> Model:
    """The plain model after one step with all micro-batches of all ranks."""
    reference = make_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    everything = [batch for rank in range(ranks.world_size) for batch in batches_of(rank)]
    data_parallel(reference, everything, loss_of)
    optimizer.step()
    return reference


# The checks. Each is told what sharded the model before the snippet, if anything did.

Check = Callable[[Scene], None]
CHECKS: dict[str, tuple[str | None, Check]] = {}


def check(name: str, shard: str | None = None) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS[name] = (shard, function)
        return function

    return register


@check("blocks")
def check_blocks(scene: Scene) -> None:
    assert scene.is_sharded("", "blocks.0", "blocks.1")
    assert scene.trains()


@check("by class")
def check_by_class(scene: Scene) -> None:
    assert scene.is_sharded("", "embed", "blocks.0", "blocks.1")
    assert scene.trains()


@check("by size")
def check_by_size(scene: Scene) -> None:
    """``down`` and ``up`` have 104 and 108 parameters; what is left of a block has 16."""
    layers = [f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")]
    assert not any(sum(p.numel() for p in m.norm.parameters()) >= 100 for m in scene.model.blocks)
    assert scene.is_sharded("", *layers)
    assert scene.trains()


@check("replicate")
def check_replicate(scene: Scene) -> None:
    for param in scene.model.parameters():
        assert param.placements == (Replicate(),)
        assert param.to_local().shape == param.shape
    assert scene.trains()


@check("hybrid")
def check_hybrid(scene: Scene) -> None:
    for param in scene.model.parameters():
        assert param.placements == (Replicate(), Shard(0))
    assert same_as_new(scene.model), "the replicas had different values before"
    assert scene.trains()


@check("casts")
def check_casts(scene: Scene) -> None:
    loss_of(scene.model, scene.names["batches"][0]).backward()
    float32, bfloat16 = torch.float32, torch.bfloat16
    for block in scene.model.blocks:
        assert block.seen == {"x": bfloat16, "positions": float32, "up": bfloat16}
        assert block.scale.dtype is bfloat16
    assert scene.model.seen is float32
    assert {p.grad.dtype for p in scene.model.parameters()} == {float32}


@check("scaler", SHARD_HALF)
def check_scaler(scene: Scene) -> None:
    """An overflow on one rank: no rank steps, and the scale is halved."""
    scaler, model = scene.names["scaler"], scene.model
    assert not same_as_new(model)
    before = [whole(p).clone() for p in model.parameters()]
    scale = scaler.get_scale()
    overflow = float("inf") if scene.ranks.rank == 1 else 1.0
    scaler.scale(loss_of(model, scene.names["batches"][0]) * overflow).backward()
    scaler.step(scene.names["optimizer"])
    scaler.update()
    assert all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters()))
    assert scaler.get_scale() == scale / 2


def same_as_new(model: nn.Module) -> bool:
    new = dict(make_model().named_parameters())
    return all(torch.equal(whole(p), new[name]) for name, p in model.named_parameters())


@check("accumulate", SHARD_FIRST)
def check_accumulate(scene: Scene) -> None:
    """And each of the three groups has reduced once, not in every micro-batch."""
    assert same_parameters(scene.model, accumulated(scene.ranks))
    with fsdp2.trace(scene.model) as events:
        scene.run(SNIPPETS["accumulate"][1])
    assert len(re.findall(r"^reduce ", str(events), re.MULTILINE)) == 3
    assert scene.trains()


@check("accumulate hybrid", SHARD_HYBRID)
def check_accumulate_hybrid(scene: Scene) -> None:
    assert same_parameters(scene.model, accumulated(scene.ranks))
    assert scene.trains()


@check("tokens", SHARD_FIRST)
def check_tokens(scene: Scene) -> None:
    """The gradient of the mean over all tokens of all ranks and micro-batches at once."""
    reference = make_model()
    pieces = [piece for rank in range(scene.ranks.world_size) for piece in labelled_of(rank)]
    tokens = torch.cat([tokens for tokens, _ in pieces])
    targets = torch.cat([targets for _, targets in pieces])
    logits = reference(tokens).flatten(0, 1)
    F.cross_entropy(logits, targets.flatten(), ignore_index=-100).backward()
    assert same_gradients(scene.model, reference)
    assert scene.names["count"] == (targets != -100).sum()
    assert_idle(scene.model)


@check("clip", SHARD_FIRST)
def check_clip(scene: Scene) -> None:
    reference = make_model()
    first = [batches_of(rank)[0] for rank in range(scene.ranks.world_size)]
    data_parallel(reference, first, loss_of)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.testing.assert_close(scene.names["norm"], expected)
    assert not isinstance(scene.names["norm"], DTensor)
    assert same_gradients(scene.model, reference)
    theirs = nn.utils.clip_grad_norm_(scene.model.parameters(), float("inf"))
    assert isinstance(theirs, DTensor)
    torch.testing.assert_close(theirs.full_tensor(), expected.clamp(max=1.0))


@check("full", SHARD_FIRST)
def check_full(scene: Scene) -> None:
    plain = dict(make_model().named_parameters())
    expected = {name: p.norm().item() for name, p in plain.items()}
    assert scene.names["sizes"] == pytest.approx(expected)
    found = scene.model.head.weight.full_tensor()
    assert found[0].eq(0).all()
    assert torch.equal(found[1:], plain["head.weight"][1:])
    gradients = {n: p.grad.full_tensor().norm() for n, p in scene.model.named_parameters()}
    torch.testing.assert_close(scene.names["norms"], gradients)


@check("save", SHARD_FIRST)
def check_save(scene: Scene) -> None:
    assert all(isinstance(value, DTensor) for value in parameters_in(scene.names["model_state"]))
    assert (Path(scene.names["folder"]) / ".metadata").exists()


@check("resume", SHARD_FIRST)
def check_resume(scene: Scene) -> None:
    assert same_as_new(scene.model), "saved before the parameters were changed"
    assert scene.trains()


def parameters_in(state: dict[str, Any]) -> list[Any]:
    return [state[name] for name, _ in make_model().named_parameters()]


@check("full state", SHARD_FIRST)
def check_full_state(scene: Scene) -> None:
    if scene.ranks.rank > 0:
        assert scene.names["state"] == {}
        return
    state = torch.load(f"{scene.names['folder']}/model.pt")
    plain = Model()
    plain.load_state_dict(state)
    assert same_as_new(plain)


@check("load")
def check_load(scene: Scene) -> None:
    assert scene.is_sharded("", "blocks.0", "blocks.1")
    assert all(p.to_local().device.type == "cpu" for p in scene.model.parameters())
    for param in scene.model.parameters():
        assert param.full_tensor().eq(0.25).all()
    assert scene.trains()


@check("offload")
def check_offload(scene: Scene) -> None:
    assert all(p.to_local().device.type == "cpu" for p in scene.model.parameters())
    assert scene.trains()


@check("limit", SHARD_FIRST)
def check_limit(scene: Scene) -> None:
    assert "gather" in str(scene.names["events"])
    assert scene.trains()


@check("ignored")
def check_ignored(scene: Scene) -> None:
    head = scene.model.head.weight
    assert type(head) is nn.Parameter
    reference = make_model()
    first = [batches_of(rank)[0] for rank in range(scene.ranks.world_size)]
    data_parallel(reference, first, loss_of)
    assert same_gradients(scene.model, reference)


@check("tied")
def check_tied(scene: Scene) -> None:
    model, reference = scene.model, make_model()
    reference.head.weight = reference.embed.weight
    first = [batches_of(rank)[0] for rank in range(scene.ranks.world_size)]
    data_parallel(reference, first, loss_of)
    loss_of(model, scene.names["batches"][0]).backward()
    assert same_gradients(model, reference)
    assert model.head.weight is model.embed.weight


@check("method", SHARD_FIRST)
def check_method(scene: Scene) -> None:
    def loss_and_penalty(model: Any, tokens: Tensor) -> Tensor:
        return loss_of(model, tokens) + 0.1 * model.penalty()

    reference = make_model()
    first = [batches_of(rank)[0] for rank in range(scene.ranks.world_size)]
    data_parallel(reference, first, loss_and_penalty)
    assert same_gradients(scene.model, reference)
    assert_idle(scene.model)


# Running them


def test_every_snippet_is_checked() -> None:
    """No block of the page is left out, and no check is left over."""
    languages = re.findall(r"^```(\w+)$", PAGE, re.MULTILINE)
    assert "" not in SNIPPETS, "a block has no name"
    assert len(SNIPPETS) == len(languages), "two blocks have one name, or one is not Python"
    assert set(SNIPPETS) == {*CHECKS, *DIFFS, *LIBRARIES}


def test_links_lead_somewhere() -> None:
    """Every link inside the page names a heading; every short one is defined once, and used."""
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    defined = re.findall(r"^\[([^\]]+)\]: #(.*)$", PAGE, re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    used = set(re.findall(r"\[([^\]]+)\](?![:(\]])", re.sub(r"(?<!\[)`[^`]*`", "", prose)))
    assert {anchor for _, anchor in defined} | set(re.findall(r"\]\(#(.*?)\)", PAGE)) <= anchors
    assert len(dict(defined)) == len(defined)
    assert used == dict(defined).keys()


def test_names_exist() -> None:
    """What the page calls of this package is there, and nothing of the module's is misspelt."""
    public = set(re.findall(r"fsdp2\.(\w+)", PAGE))
    assert public and public <= {*fsdp2.__all__, "checkpoint"}
    theirs = {"set_z3_leaf_modules", "set_state_dict", "set_model_state_dict"}
    setters = set(re.findall(r"\bset_\w+", PAGE)) - theirs
    assert {name for name in setters if not hasattr(FSDPModule, name)} == {"set_inflight_limit"}


@distributed(2)
@pytest.mark.parametrize("name", list(CHECKS))
def test_snippet(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """The snippet runs, and its check holds."""
    scene = Scene(ranks, tmp_path)
    shard, function = CHECKS[name]
    if name == "load" and ranks.rank == 0:
        full = {key: torch.full_like(v, 0.25) for key, v in make_model().state_dict().items()}
        torch.save(full, tmp_path / "model.pt")
    if name == "hybrid" and ranks.rank == 1:
        nn.init.ones_(scene.model.head.weight)
    if shard is not None:
        scene.names["hybrid_mesh"] = ranks.mesh(2, 1, names=("replicate", "shard"))
        scene.shard(shard)
    if name == "resume":
        scene.run(SNIPPETS["save"][1])
        nn.init.ones_(scene.model.head.weight)
    scene.run(SNIPPETS[name][1], name)
    function(scene)


def side(code: str, other: str) -> str:
    """What remains of a diff without the lines that begin with ``other``."""
    return "\n".join(line[1:] for line in code.splitlines() if not line.startswith(other))


def trained(ranks: Ranks, folder: Path, program: str, name: str) -> nn.Module:
    scene = Scene(ranks, folder)
    scene.run(program, name)
    model = scene.model
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


THEIRS = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in batches:
    (loss_of(model, batch) / len(batches)).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""

CANNOT_RUN = {
    "fsdp1": "torch.distributed.fsdp import FullyShardedDataParallel",  # needs an accelerator
    "deepspeed": "import deepspeed",  # is not installed, and needs an accelerator
}
"""Programs that are not run, and a line of theirs."""


@distributed(2)
@pytest.mark.parametrize("name", DIFFS)
def test_diff(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Both sides train the same parameters; what cannot run is replaced by PyTorch's FSDP2."""
    code = SNIPPETS[name][1]
    ours = trained(ranks, tmp_path, side(code, "-"), name)
    assert isinstance(ours, FSDPModule)
    assert not same_as_new(ours)
    if name in CANNOT_RUN:
        assert CANNOT_RUN[name] in side(code, "+")
        compile(side(code, "+"), name, "exec")
        before = THEIRS if name == "deepspeed" else side(SNIPPETS["fsdp2"][1], "+")
    else:
        before = side(code, "+")
    theirs = trained(ranks, tmp_path, before, name)
    assert not isinstance(theirs, FSDPModule)
    # A step of AdamW moves by about 1e-3, whatever the gradient; the sums differ in rounding.
    assert same_parameters(ours, theirs, rtol=0, atol=2e-5)
    assert_idle(ours)


@distributed(2)
def test_token_table(ranks: Ranks) -> None:
    """The example with the losses 4 and 0, 1, 2: what the table says is what the ranks get."""
    losses = torch.tensor([4.0] if ranks.rank == 0 else [0.0, 1.0, 2.0])

    def result(factor: float | None, count: int) -> float:
        """The gradient of a weight of 1 that the losses are multiplied by."""
        model = nn.Linear(1, 1, bias=False)
        fsdp2.fully_shard(model)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        (model(losses.unsqueeze(-1)).sum() / count).backward()
        return model.weight.grad.full_tensor().item()

    assert result(None, len(losses)) == 2.5
    assert result(1.0, 4) == 1.75
    assert all(f"= {each}" in PAGE for each in ("2.5", "1.75"))


# Libraries, in processes of their own

PRELUDE = """
import sys
sys.path[:0] = [{tests!r}, {clients!r}]
import torch, torch.distributed as dist
import test_switching as page
folder = {folder!r}
"""

END = """
import time
from fsdp2 import FSDPModule
sharded = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
assert len(sharded) > 1, sharded
print("steps", steps)
time.sleep(0.3)  # a gloo thread may outlive the last collective, and must not meet the exit
dist.destroy_process_group()
"""

ON_CPU = """
import accelerate
from accelerate_on_cpu import shard_on_cpu
from tiny_llama import Tokens, batch, tiny_llama

class OnCPU(accelerate.Accelerator):
    def __init__(self, *, fsdp_plugin, **options):
        super().__init__(cpu=True, fsdp_plugin=fsdp_plugin, **options)
        shard_on_cpu(self, fsdp_plugin)

model = tiny_llama(tied=False)
"""
"""accelerate and the Trainer shard on an accelerator only."""

BEFORE = {
    "accelerate": ON_CPU
    + """
accelerate.Accelerator = OnCPU
optimizer = torch.optim.AdamW(model.parameters())
batches = [dict(input_ids=t, labels=t) for t in map(batch, range(4))]
""",
    "trainer": ON_CPU
    + """
import functools, transformers
from accelerate.utils import FullyShardedDataParallelPlugin

class TrainerOnCPU(transformers.Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        shard_on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
        self.is_fsdp_enabled = True

arguments = functools.partial(transformers.TrainingArguments, use_cpu=True, report_to=[])
transformers.Trainer, transformers.TrainingArguments = TrainerOnCPU, arguments
dataset = Tokens(32)
""",
    "lightning": """
import functools, lightning
from test_switching import loss_of, make_model
quiet = dict.fromkeys(
    ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
)
lightning.Trainer = functools.partial(lightning.Trainer, accelerator="cpu", devices=2, **quiet)
batches = torch.utils.data.DataLoader(torch.cat(page.batches_of(0)), batch_size=1)
""",
}

AFTER = {
    "accelerate": "steps = optimizer.state[next(model.parameters())]['step']",
    "trainer": "model, steps = trainer.model, trainer.state.global_step",
    "lightning": "model, steps = trainer.lightning_module.model, trainer.global_step",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LIBRARIES))
def test_library(tmp_path: Path, name: str) -> None:
    """The library's own loop takes two steps with a model that this package has sharded."""
    missing = [library for library in LIBRARIES[name] if find_spec(library) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install -c constraints.txt -e '.[clients]'")
    tests = Path(__file__).parent
    prelude = PRELUDE.format(tests=str(tests), clients=str(tests / "clients"), folder=str(tmp_path))
    program = "\n".join([prelude, BEFORE[name], SNIPPETS[name][1], AFTER[name], END])
    script = tmp_path / "snippet.py"
    script.write_text(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"steps (?:tensor\()?2", done.stdout)) == 2, done.stdout
