"""What a run tells: a progress bar, ``loss.csv`` and ``loss.png``."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One line of ``loss.csv``."""

    step: int
    loss: float
    tokens_per_second: float
    exposed: float


class Report:
    """Shows each step and appends it to ``loss.csv``; silent on ranks that are not ``active``.

    A run that resumes after ``finished`` steps keeps the file's rows up to there, and drops what
    an interrupted run wrote behind its last checkpoint.
    """

    def __init__(self, folder: Path, finished: int, steps: int, active: bool) -> None:
        self.active = active
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "loss.csv"
        kept = [row for row in read_rows(self.path) if row.step <= finished]
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows([Row._fields, *kept])
        self.bar: Any = _progress_bar(finished, steps)

    def add(self, row: Row, memory_gib: float) -> None:
        """Append ``row``; ``memory_gib`` is the peak per rank."""
        if not self.active:
            return
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(row)
        self.bar.set_postfix_str(
            f"loss {row.loss:.3f}, {row.tokens_per_second:,.0f} tokens/s, "
            f"{memory_gib:.2f} GiB/rank, exposed communication {row.exposed:.1%}",
            refresh=False,
        )
        self.bar.update()

    def say(self, text: str) -> None:
        """Print ``text`` below the progress bar."""
        if self.active:
            self.bar.close()
            print(text, flush=True)

    def plot(self, validation_loss: float) -> None:
        """Draw ``loss.png`` beside ``loss.csv`` where matplotlib is installed."""
        if not self.active or importlib.util.find_spec("matplotlib") is None:
            return
        from matplotlib.figure import Figure

        rows = read_rows(self.path)
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per byte")
        axes.plot([row.step for row in rows], [row.loss for row in rows], label="train")
        axes.axhline(validation_loss, color="C1", label="validation, at the end")
        axes.legend()
        figure.savefig(self.path.with_suffix(".png"), dpi=150)


def read_rows(path: Path) -> list[Row]:
    """The rows of a ``loss.csv``; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Row(
                int(row["step"]),
                float(row["loss"]),
                float(row["tokens_per_second"]),
                float(row["exposed"]),
            )
            for row in csv.DictReader(file)
        ]


def _progress_bar(finished: int, steps: int) -> Any:
    if importlib.util.find_spec("tqdm") is None:
        return _PrintedLines(finished, steps)
    return importlib.import_module("tqdm").tqdm(
        initial=finished, total=steps, unit="step", mininterval=0.5
    )


class _PrintedLines:
    """The part of tqdm's interface that is used here, as a line for every tenth of the run."""

    def __init__(self, finished: int, steps: int) -> None:
        self.step, self.steps = finished, steps
        self.text = ""

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def update(self) -> None:
        self.step += 1
        if self.step == self.steps or self.step % max(1, self.steps // 10) == 0:
            print(f"step {self.step}/{self.steps}: {self.text}", flush=True)

    def close(self) -> None:
        pass
