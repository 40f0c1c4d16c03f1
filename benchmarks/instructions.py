"""How many instructions sharding costs one process: counted, so a busy machine does not matter.

    python benchmarks/instructions.py --world 8,1024

The work of overhead.py and optimizer.py, each engine in a process of its own under callgrind,
which valgrind brings. Two runs differ by less than one in a hundred, where times differ by a
third. What an instruction takes depends on what the caches hold: that is what the times are for.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch

import noop
import tables
from optimizer import Case, Stepper
from overhead import Chain

HEADER = ("work", "engine", "world", "thousand instructions", "/ torch")
BLOCKS = 32
PARAMETERS = 400
STEPS = 3

STEPPERS = {"torch": "torch's DTensors", "fsdp2": "fsdp2.local_step"}


def count(work: str, engine: str, world: int) -> float:
    """Instructions of one step, in a process that is started for it."""
    options = ["--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=/dev/null"]
    command = [sys.executable, __file__, "--world", str(world), "--count", work, engine]
    # Strings hash alike, so that dicts collide alike.
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["valgrind", *options, *command], env=environment, capture_output=True, text=True
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"{work} of {engine} under valgrind failed:\n{done.stderr}")
    return int(found[1]) / STEPS


def run_counted(work: str, engine: str, world: int) -> None:
    """What the started process does: some steps to set up, and some that callgrind counts."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    noop.start(world)
    step, clean = _STEPS[work](engine)
    for _ in range(4):
        step()
        clean()
    for _ in range(STEPS):
        _switch("on")
        step()
        _switch("off")
        clean()


def _chain(engine: str) -> tuple[Callable[[], object], Callable[[], object]]:
    chain = Chain(engine, BLOCKS, linears=8)

    def step() -> None:
        chain.model(chain.inputs).backward()

    return step, chain.model.zero_grad


def _optimizer(engine: str) -> tuple[Callable[[], object], Callable[[], object]]:
    stepper = Stepper(STEPPERS[engine], PARAMETERS, Case("foreach", 1))
    return stepper.step, lambda: None


_STEPS = {"forward and backward, per group": _chain, "optimizer, per parameter": _optimizer}


def _switch(to: str) -> None:
    subprocess.run(["callgrind_control", "-i", to, str(os.getpid())], check=True, stdout=sys.stderr)


def _rows(worlds: list[int]) -> list[tuple[str, ...]]:
    rows = []
    for world in worlds:
        for work in _STEPS:
            of_chain = _STEPS[work] is _chain
            plain = count(work, "plain", world) if of_chain else 0.0
            number = BLOCKS + 1 if of_chain else PARAMETERS  # the root is a group too
            found = {each: (count(work, each, world) - plain) / number for each in STEPPERS}
            for engine, instructions in found.items():
                ratio = f"{instructions / found['torch']:.3f}"
                rows.append((work, engine, str(world), f"{instructions / 1e3:.1f}", ratio))
    return rows


def main() -> None:
    """Count what the command line asks for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world", default="8,1024", help="numbers of ranks, separated by commas")
    parser.add_argument("--count", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    worlds = [int(size) for size in options.world.split(",")]
    if options.count:
        return run_counted(*options.count, worlds[0])
    if shutil.which("valgrind") is None:
        parser.exit(2, "instructions.py counts with valgrind, which is not installed here\n")
    rows = _rows(worlds)
    print(f"{tables.machine()}; {BLOCKS} blocks of 16 parameters; {PARAMETERS} parameters\n")
    print(tables.markdown(HEADER, rows))


if __name__ == "__main__":
    main()
