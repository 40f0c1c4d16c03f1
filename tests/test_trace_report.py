"""What a trace says about waiting: hidden, exposed and why; as text, JSON and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fsdp2
from fsdp2.events import Event
from fsdp2.tracing import Trace
from fsdp2.transfers import Transfer, Why
from harness import Ranks, distributed
from models import Net, assert_idle, next_token_loss, shard_blocks, token_batches


def trace_of(*events: tuple[Any, ...], limit: int = 2) -> Trace:
    """Of (name, group, detail, at, seconds), the last two in milliseconds."""
    made = [Event(name, group, detail, at / 1e3, s / 1e3) for name, group, detail, at, s in events]
    return Trace(made, limit)


def reasons(trace: Trace) -> list[tuple[str, str, Why]]:
    return [(t.kind, t.group, t.why) for t in trace.transfers]


def test_hidden_and_exposed_add_up() -> None:
    """Hidden until the host comes for it, exposed from then on."""
    trace = trace_of(
        ("gather", "a", "on demand", 0, 0),
        ("wait", "a", "", 4, 4),
        ("gather", "b", "ahead", 4, 0),
        ("forward", "a", "", 5, 0),
        ("wait", "b", "", 10, 1),
        ("forward", "b", "", 10, 0),
    )
    first, second = trace.transfers
    assert first == Transfer("gather", "a", 0.0, 0.0, 0.004, Why.FIRST)
    assert second.hidden == pytest.approx(0.005)
    assert second.exposed == pytest.approx(0.001)
    assert second.why is Why.SLOW
    assert sum(t.exposed for t in trace.transfers) == pytest.approx(trace.exposed_seconds)


def test_why_a_gather_was_waited_for() -> None:
    """Nothing before it; no order yet; the limit; not expected."""
    recording = [
        ("gather", "a", "on demand", 0, 0),
        ("wait", "a", "", 1, 1),
        ("forward", "a", "", 1, 0),
        ("gather", "b", "on demand", 2, 0),
        ("wait", "b", "", 3, 1),
        ("forward", "b", "", 3, 0),
        ("free", "a", "", 4, 0),
    ]
    assert reasons(trace_of(*recording))[1] == ("gather", "b", Why.UNKNOWN)
    ahead = [
        ("gather", "c", "ahead", 5, 0),
        ("wait", "c", "", 6, 0),
        ("gather", "d", "on demand", 6, 0),
        ("wait", "d", "", 7, 1),
    ]
    assert reasons(trace_of(*recording, *ahead))[-2:] == [
        ("gather", "c", Why.HIDDEN),
        ("gather", "d", Why.LIMIT),
    ]
    assert reasons(trace_of(*recording, *ahead, limit=4))[-1] == ("gather", "d", Why.SURPRISE)


def test_why_a_reduction_was_waited_for() -> None:
    """The last one has nothing to hide behind."""
    trace = trace_of(
        ("backward", "b", "", 0, 0),
        ("reduce", "b", "", 1, 0),
        ("backward", "a", "", 1, 0),
        ("reduce", "a", "", 2, 0),
        ("summed", "b", "", 4, 1),
        ("reduced", "a", "", 6, 2),
    )
    assert reasons(trace) == [("reduction", "b", Why.SLOW), ("reduction", "a", Why.LAST)]


def test_what_nobody_came_for_is_left_out() -> None:
    """A gather that was freed before it was used is no transfer."""
    trace = trace_of(("gather", "a", "ahead", 0, 0), ("free", "a", "", 1, 0))
    assert trace.transfers == []
    assert trace.report().endswith("exposed in all: 0.00 ms")


@distributed(2)
def test_a_step_is_accounted_for(ranks: Ranks) -> None:
    """All waiting of a real step has a group, a kind and a reason."""
    model = shard_blocks(Net(), mesh=ranks.mesh())
    batches = token_batches(ranks.world_size, 3)
    for batch in batches[:2]:
        next_token_loss(model, batch[ranks.rank]).backward()
    with fsdp2.trace(model) as trace:
        next_token_loss(model, batches[2][ranks.rank]).backward()
    found = trace.transfers
    assert sum(t.exposed for t in found) == pytest.approx(trace.exposed_seconds)
    assert {t.kind for t in found} == {"gather", "reduction"}
    assert len([t for t in found if t.kind == "reduction"]) == 3
    assert all(t.hidden >= 0 and t.exposed >= 0 for t in found)
    lines = trace.report().splitlines()
    assert lines[0].split() == ["group", "kind", "times", *["hidden", "ms", "exposed", "ms", "why"]]
    groups = {group.name for group in fsdp2.explain(model).groups}
    assert {line.split("  ")[0] for line in lines[1:-1]} == groups
    assert_idle(model)


@distributed(2)
def test_perfetto_and_picture(ranks: Ranks, tmp_path: Path) -> None:
    """Spans lie inside the trace, on their tracks; the picture is one."""
    model = shard_blocks(Net(), mesh=ranks.mesh())
    batch = token_batches(ranks.world_size, 1)[0][ranks.rank]
    with fsdp2.trace(model) as trace:
        next_token_loss(model, batch).backward()
    file = tmp_path / f"{ranks.rank}.json"
    trace.write_perfetto(file)
    entries = json.loads(file.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in entries if e["ph"] == "M"}
    assert names == {0: "host", 1: "gathers", 2: "reductions"}
    spans = [entry for entry in entries if entry["ph"] == "X"]
    assert {span["tid"] for span in spans} >= {1, 2}
    end = trace.events[-1].at * 1e6
    assert all(span["ts"] >= 0 and span["ts"] + span["dur"] <= end + 1 for span in spans)
    picture = tmp_path / f"{ranks.rank}.png"
    trace.plot(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
