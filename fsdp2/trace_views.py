"""A traced step as a table, as JSON for Perfetto, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from fsdp2.events import Event
from fsdp2.transfers import Transfer, Why

_COMPUTING = ("forward", "backward")


def table(transfers: Sequence[Transfer], events: Sequence[Event] = ()) -> str:
    """One line for each group and kind, the most exposed first; then what the limit became."""
    rows: dict[tuple[str, str], list[Transfer]] = {}
    for transfer in transfers:
        rows.setdefault((transfer.group, transfer.kind), []).append(transfer)
    exposed = {key: sum(t.exposed for t in members) for key, members in rows.items()}
    width = max((len(group) for group, _ in rows), default=0)
    lines = [f"{'group':<{width}}  kind       times  hidden ms  exposed ms  why"]
    for key in sorted(rows, key=lambda key: -exposed[key]):
        group, kind = key
        members = rows[key]
        hidden = sum(t.hidden for t in members)
        lines.append(
            f"{group:<{width}}  {kind:<9}  {len(members):5d}  {hidden * 1e3:9.2f}  "
            f"{exposed[key] * 1e3:10.2f}  {_main_reason(members).value}"
        )
    lines += [f"limit {event.detail}" for event in events if event.name == "limit"]
    total = sum(exposed.values())
    return "\n".join([*lines, f"exposed in all: {total * 1e3:.2f} ms"])


def _main_reason(transfers: Iterable[Transfer]) -> Why:
    """The one that most waiting is due to."""
    waited: dict[Why, float] = {}
    for transfer in transfers:
        waited[transfer.why] = waited.get(transfer.why, 0.0) + transfer.exposed
    return max(waited, key=lambda why: waited[why])


def write_perfetto(
    path: str | PathLike[str], events: Sequence[Event], transfers: Sequence[Transfer]
) -> None:
    """Three tracks: gathers, reductions, and the host with what it computes and waits for.

    The format is Chrome's "Trace Event Format"; its times are microseconds.
    """
    tracks = ("host", "gathers", "reductions")
    entries: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": name}}
        for i, name in enumerate(tracks)
    ]
    for transfer in transfers:
        track = 1 if transfer.kind == "gather" else 2
        arguments: dict[str, Any] = {
            "exposed ms": transfer.exposed * 1e3,
            "why": transfer.why.value,
        }
        entries.append(_span(track, transfer.group, transfer.start, transfer.end, arguments))
        if transfer.why is not Why.HIDDEN:
            what = f"wait for {transfer.kind} {transfer.group}"
            entries.append(_span(0, what, transfer.waited_from, transfer.end, arguments))
    for event in events:
        if event.name in (*_COMPUTING, "limit"):
            what = event.detail if event.name == "limit" else event.group
            entries.append(
                {
                    "ph": "i",
                    "s": "t",
                    "pid": 0,
                    "tid": 0,
                    "name": f"{event.name} {what}",
                    "ts": event.at * 1e6,
                }
            )
    Path(path).write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))


def _span(
    track: int, name: str, start: float, end: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    place = {"ph": "X", "pid": 0, "tid": track, "name": name}
    return place | {"ts": start * 1e6, "dur": (end - start) * 1e6, "args": arguments}


def plot(path: str | PathLike[str], events: Sequence[Event], transfers: Sequence[Transfer]) -> None:
    """Bars over time: transfers, with their exposed end darker, and where compute begins."""
    try:
        figures = import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture of a trace needs matplotlib: pip install 'fsdp2[plot]'"
        ) from error
    figure = figures.Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.add_subplot()
    heights = {"gather": 2, "reduction": 1}
    for transfer in transfers:
        at = heights[transfer.kind]
        spans = [
            (transfer.start * 1e3, transfer.hidden * 1e3),
            (transfer.waited_from * 1e3, transfer.exposed * 1e3),
        ]
        axes.broken_barh(spans, (at - 0.35, 0.7), facecolors=["#9ecae1", "#de2d26"])
    for event in events:
        if event.name in _COMPUTING:
            color = "#31a354" if event.name == "forward" else "#756bb1"
            axes.plot([event.at * 1e3] * 2, [-0.3, 0.3], color=color)
        elif event.name == "limit":
            axes.axvline(event.at * 1e3, color="#636363", linestyle=":")
            axes.text(event.at * 1e3, 2.4, f" limit {event.limit}", va="top")
    axes.set_yticks([0, 1, 2], ["compute begins", "reductions", "gathers"])
    axes.set_xlabel("ms; red: the host waits")
    figure.savefig(path)
