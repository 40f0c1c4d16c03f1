"""The arithmetic of a norm over tensors on many ranks: kernels, and what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

_WITH_FLOAT64 = ("cpu", "cuda", "xpu")


@dataclass(frozen=True)
class Kernels:
    """The operations on many tensors: one kernel for all of a kind, or one for each."""

    is_foreach: bool

    def norms(self, tensors: Sequence[Tensor], p: float) -> list[Tensor]:
        """Their p-norms in float32 at least. All of one device and dtype, none empty."""
        first = tensors[0].dtype
        dtype = None if first.is_complex else torch.promote_types(first, torch.float32)
        if self.is_foreach:
            return list(torch._foreach_norm(list(tensors), p, dtype=dtype))
        return [torch.linalg.vector_norm(tensor, p, dtype=dtype) for tensor in tensors]

    def scale(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """In place. The factor stays in its own dtype, also for gradients of 16 bits."""
        for device, alike in _by_kind(tensors):
            own = factor.to(device)
            if self.is_foreach:
                torch._foreach_mul_(alike, own)
            else:
                for tensor in alike:
                    tensor.mul_(own)


def _by_kind(tensors: Iterable[Tensor]) -> Iterator[tuple[torch.device, list[Tensor]]]:
    """Those that one kernel can take together; empty ones are left out."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, _), alike in kinds.items():
        yield device, alike


class Measure:
    """What ranks exchange for a p-norm, as a tensor that is added up (or its maximum taken).

    For finite p it is ``[sum of |x|^p]``. For p = inf it is ``[max |x|, whether there is a
    NaN]``, since backends differ in whether a maximum over ranks keeps a NaN.
    """

    def __init__(self, p: float, kernels: Kernels) -> None:
        self.p = p
        self.kernels = kernels
        self.is_max = p == inf
        self.op = dist.ReduceOp.MAX if self.is_max else dist.ReduceOp.SUM
        self.join: Callable[[Tensor, Tensor], Tensor] = torch.maximum if self.is_max else torch.add

    def of(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """That of local tensors, on ``device``."""
        # Powers of a norm leave the range of float32 long before the norm does.
        dtype = torch.float64 if device.type in _WITH_FLOAT64 else torch.float32
        total = torch.zeros(2 if self.is_max else 1, dtype=dtype, device=device)
        for _, alike in _by_kind(tensors):
            norms = torch.stack(self.kernels.norms(alike, self.p))
            total = self.join(total, self._term(norms.to(device=device, dtype=dtype)))
        return total

    def _term(self, norms: Tensor) -> Tensor:
        if not self.is_max:
            return norms.pow(self.p).sum(0, keepdim=True)
        largest = norms.nan_to_num(nan=0.0, posinf=inf).amax()
        return torch.stack([largest, norms.isnan().any().to(norms.dtype)])

    def norm(self, term: Tensor) -> Tensor:
        """The 0-dim norm, of what all ranks' terms were joined to."""
        if not self.is_max:
            return term[0].pow(1.0 / self.p)
        return torch.where(term[1] > 0, torch.nan, term[0])
