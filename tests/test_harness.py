"""The harness keeps its promises: results, failures, time limits and reuse."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable

import expecttest
import pytest
import torch
import torch.distributed as dist

from harness import Ranks, distributed, run


@distributed(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_body_runs_for_each_world_size_and_parameter(ranks: Ranks, dtype: torch.dtype) -> None:
    """The body sees its group and the parameters of the marks around it."""
    total = torch.ones(1, dtype=dtype)
    dist.all_reduce(total)
    assert total.item() == ranks.world_size == dist.get_world_size()
    assert ranks.rank == dist.get_rank()


@pytest.mark.parametrize("value", [1, 2])
@distributed(2)
def test_marks_may_stand_above(ranks: Ranks, value: int) -> None:
    """`parametrize` composes from both sides of the decorator."""
    assert value in (1, 2)


def skip(ranks: Ranks) -> None:
    pytest.skip("no such thing here")


def test_skip_in_a_body_skips_the_test() -> None:
    """`pytest.skip` works in a body."""
    with pytest.raises(pytest.skip.Exception, match="no such thing here"):
        run(skip, 2)


@distributed(4)
def test_mesh_is_shared(ranks: Ranks) -> None:
    """One mesh object for each shape and names, so tests don't pile up process groups."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    assert mesh is ranks.mesh(2, 2, names=("replicate", "shard"))
    assert ranks.mesh().shape == (4,)


def describe(ranks: Ranks, power: int, *, add: int = 0) -> tuple[int, int, int]:
    return ranks.rank, ranks.rank**power + add, os.getpid()


def test_results_in_rank_order() -> None:
    """`run` returns one result a rank, in rank order, with all arguments passed."""
    results = run(describe, 3, 2, add=10)
    assert [result[:2] for result in results] == [(0, 10), (1, 11), (2, 14)]


def test_workers_are_reused() -> None:
    """Two calls meet the same processes; another world size does not disturb them."""
    first = run(describe, 2, 1)
    run(describe, 1, 1)
    assert run(describe, 2, 1) == first


class TestGoldenText(expecttest.TestCase):
    def test_expected_inline(self) -> None:
        """Golden text is compared in the parent, where it can be accepted."""
        self.assertExpectedInline(str(run(draw, 2)[0]), """tensor([0.4963, 0.7682])""")


def draw(ranks: Ranks) -> torch.Tensor:
    return torch.rand(2)


def test_seed_is_reset_before_each_body() -> None:
    """All ranks, and all tests, start from the same random state."""
    draws = run(draw, 2) + run(draw, 2)
    assert all(torch.equal(draws[0], other) for other in draws)


def fail_on(ranks: Ranks, rank: int) -> None:
    if ranks.rank == rank:
        raise RuntimeError("broken on purpose")


def test_failing_rank_is_named() -> None:
    """The message holds the failing rank's traceback, and no other's; the next test gets a pool."""
    with pytest.raises(AssertionError) as failure:
        run(fail_on, 3, 1)
    text = str(failure.value)
    assert "rank 1 raised" in text and "in fail_on" in text and "broken on purpose" in text
    assert "rank 0" not in text and "rank 2" not in text
    assert len(run(describe, 3, 1)) == 3


def fail_while_others_wait(ranks: Ranks) -> None:
    fail_on(ranks, 1)
    dist.barrier()


def test_failure_does_not_wait_for_the_blocked_ranks() -> None:
    """A rank that waits for a failed one is ended after the grace, and its stack is shown."""
    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        run(fail_while_others_wait, 2)
    assert time.monotonic() - start < 15
    text = str(failure.value)
    assert text.index("rank 1 raised") < text.index("rank 0 had not finished")
    assert "in barrier" in text


def sleep_on_rank_1(ranks: Ranks) -> None:
    if ranks.rank == 1:
        time.sleep(60)


def test_timeout_shows_stacks() -> None:
    """A body past its limit is ended; the message shows where it was."""
    with pytest.raises(AssertionError) as failure:
        run(sleep_on_rank_1, 2, timeout=3)
    text = str(failure.value)
    assert "rank 1 had not finished (the limit is 3 s" in text and "in sleep_on_rank_1" in text
    assert "rank 0" not in text


def die(ranks: Ranks, how: str) -> None:
    if how == "exit":
        os._exit(3)
    os.abort()


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("abort", -6)])
def test_death_is_reported(how: str, code: int) -> None:
    """A worker that ends without an answer is reported with its exit code."""
    with pytest.raises(AssertionError, match=f"rank 0 died with exit code {code}") as failure:
        run(die, 1, how)
    assert ("in die" in str(failure.value)) == (how == "abort")


def warn(ranks: Ranks) -> None:
    warnings.warn("careful", stacklevel=1)


def disable_grad(ranks: Ranks) -> None:
    torch.set_grad_enabled(False)


def return_a_lambda(ranks: Ranks) -> object:
    return lambda: None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (warn, "UserWarning: careful"),
        (disable_grad, "global state changed: {'grad mode': False}"),
        (return_a_lambda, "pickle"),
    ],
    ids=["warning", "global-state", "unpicklable-result"],
)
def test_bad_manners_fail(body: Callable[[Ranks], object], message: str) -> None:
    """A warning, changed global state and a result that cannot travel are failures."""
    with pytest.raises(AssertionError, match=message):
        run(body, 1)


def test_local_bodies_are_refused() -> None:
    """A body that workers cannot import is refused with the remedy."""
    with pytest.raises(ValueError, match="move the body to the top level of test_harness"):
        run(lambda ranks: None, 2)
