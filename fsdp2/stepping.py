"""Optimizer steps on local tensors: without DTensor's dispatch, many parameters at once."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from operator import is_
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp2 import _torch
from fsdp2.errors import UsageError
from fsdp2.guard import name_of
from fsdp2.neighbours import join
from fsdp2.spans import Piece, Span

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_PER_ELEMENT = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Classes whose update of an element depends on nothing but this element's own history."""


def local_step(
    optimizer: OptimizerT, *, per: Literal["element", "row"] | None = None
) -> OptimizerT:
    """Let ``optimizer.step()`` compute on this rank's tensors; returns the same optimizer.

    Parameters that lie behind each other in a group's shard buffer become one flat tensor during
    the step, so that 400 small parameters cost what a few large ones do. Values, state and state
    dict are bit for bit those of the same optimizer on plain tensors, and before and after a step
    ``param_groups`` and ``state`` hold DTensors as they do without it. Parameters may live on
    several meshes. Call it right after the optimizer is made, before learning-rate schedulers::

        optimizer = fsdp2.local_step(torch.optim.AdamW(model.parameters(), lr=1e-3))

    Args:
        optimizer: Its parameters are those of sharded models, or plain tensors.
        per: What an optimizer computes independently, if it is not one of ``torch.optim``:
            ``"element"`` for one like Adam; ``"row"`` if each row of a parameter needs that row
            only, such as one with a second moment per row. It then gets each parameter's local
            rows, one tensor for each parameter, and no communication takes place.

    Raises:
        TypeError: It is not known that the optimizer may be given parts of its parameters.
        UsageError: ``step`` has been replaced already, or the optimizer is differentiable.
    """
    if per is None and type(optimizer) not in _PER_ELEMENT:
        raise TypeError(
            f"local_step: {type(optimizer).__name__} may need whole parameters, for a norm or an "
            "orthogonal update, and a rank has rows only; pass per='element' or per='row' if it "
            "computes these independently, use fsdp2.Muon for torch.optim.Muon, or step without "
            "local_step"
        )
    if "step" in vars(optimizer):
        raise UsageError(
            f"local_step: {type(optimizer).__name__}.step was replaced on this optimizer already, "
            "as learning-rate schedulers do; call local_step once, right after the optimizer is "
            "made"
        )
    stepper = _LocalStep(optimizer, per or "element")

    @functools.wraps(_torch.step_without_hooks(optimizer))
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return stepper.step(closure)

    optimizer.step = MethodType(_torch.with_step_hooks(step), optimizer)  # type: ignore[method-assign]
    return optimizer


class _LocalStep:
    """Stands between ``optimizer.step()`` and what the optimizer's class does in it."""

    def __init__(self, optimizer: Optimizer, per: str) -> None:
        self._optimizer = optimizer
        self._per = per
        self._step = _torch.step_without_hooks(optimizer)
        self._check_groups()
        self._groups: list[dict[str, Any]] = []
        """Those that ``_spans`` were made for."""
        self._ids: list[list[int]] = []
        """Of their parameters."""
        self._spans: list[list[Span]] = []
        self._entries: list[dict[str, Any]] = []
        """All values of ``optimizer.state``, in its order."""
        self._written: list[Tensor] = []
        """Parameters whose local tensors a step writes to behind their backs."""
        self._idle: list[Tensor] = []
        """Parameters that had no gradient."""

    def step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            with _torch.plain_attributes():  # of hundreds of parameters and their gradients
                is_current = self._is_current()
            if not is_current:
                self._plan()
            self._step_on_spans()
        return loss

    # Which tensors

    @property
    def spans(self) -> list[Span]:
        return [span for spans in self._spans for span in spans]

    def _is_current(self) -> bool:
        """Whether the spans of the last step will do; gives them their gradients if so."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        if len(groups) != len(self._groups) or any(p.grad is not None for p in self._idle):
            return False
        # Compared in order: a lookup of each would hash a tensor, which is a call of its own.
        if len(state) != len(self._entries) or not all(map(is_, state.values(), self._entries)):
            return False
        for group, known, ids, spans in zip(groups, self._groups, self._ids, self._spans):
            if group is not known or [*map(id, group["params"])] != ids:
                return False
            if not all(span.is_current() for span in spans):
                return False
        return True

    def _plan(self) -> None:
        known, groups = self.spans, list(self._optimizer.param_groups)
        for span in known:
            span.let_go()
        self._check_groups()
        self._groups, self._spans = [], []  # nothing is current if this raises
        found: list[list[Span]] = []
        self._idle = []
        for group in groups:
            used = [param for param in group["params"] if param.grad is not None]
            self._idle += [param for param in group["params"] if param.grad is None]
            for param in used:
                self._check(param)
            may_join = functools.partial(self._may_join, is_fused=bool(group.get("fused")))
            found.append(join(used, self._optimizer.state, may_join, known))
        self._ids = [[*map(id, group["params"])] for group in groups]
        self._groups, self._spans = groups, found
        self._entries = [*self._optimizer.state.values()]
        self._written = [m.param for span in self.spans if span.stands_in for m in span.members]

    def _check_groups(self) -> None:
        if any(group.get("differentiable") for group in self._optimizer.param_groups):
            raise UsageError(
                f"local_step: {type(self._optimizer).__name__} was made with differentiable=True, "
                "and a step on local tensors has no backward; leave one of the two out"
            )

    def _check(self, param: Tensor) -> None:
        if not isinstance(param, _torch.DTensor):
            return
        placements = param.placements
        if not isinstance(param.grad, _torch.DTensor) or param.grad.placements != placements:
            raise UsageError(
                f"local_step: the gradient of parameter {name_of(param)} is not laid out as the "
                f"parameter, {placements}; distribute_tensor(gradient, param.device_mesh, "
                "param.placements) makes such a one"
            )
        if self._per == "row" and not all(p.is_replicate() or p.is_shard(0) for p in placements):
            raise UsageError(
                f"local_step(per='row'): parameter {name_of(param)} has placements {placements}, "
                "which cut its rows; split it along dimension 0, or step without local_step"
            )

    def _may_join(self, piece: Piece, is_fused: bool) -> bool:
        """Whether an element may lie anywhere in a tensor without being rounded differently.

        On a CPU, vector instructions compute what fills a vector, and scalar ones the rest of a
        tensor. The two agree in float32 and float64 only, and not in the fused kernels.
        """
        if self._per == "row":
            return False
        is_exact = not is_fused and piece.local.dtype in (torch.float32, torch.float64)
        return is_exact or piece.local.device.type != "cpu"

    # The step

    def _step_on_spans(self) -> None:
        optimizer = self._optimizer
        every = self.spans
        own_state, own_params = optimizer.state, [group["params"] for group in self._groups]
        state = defaultdict(dict, {span.tensor: span.state for span in every})
        try:
            optimizer.state = state
            for group, spans in zip(self._groups, self._spans):
                group["params"] = [span.tensor for span in spans]
            self._step(optimizer)
        finally:
            optimizer.state = own_state
            for group, params in zip(self._groups, own_params):
                group["params"] = params
            for span in every:
                span.let_go()
        for span in every:
            span.publish(state[span.tensor])
        torch.autograd.graph.increment_version(self._written)
