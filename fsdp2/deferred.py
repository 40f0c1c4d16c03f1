"""``deferred_init``: constructors that take no memory.

Inside, whatever a constructor makes is on the meta device and says that it is on the CPU, and
the operators on it are recorded. At the end every module that was built knows, for each of its
tensors, what has been done to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from fsdp2 import _torch
from fsdp2.checksums import checksum
from fsdp2.errors import UsageError
from fsdp2.recording import CannotRecord, Recorder, is_plain
from fsdp2.tape import Region, leaves, map_leaves

_recorded: WeakKeyDictionary[nn.Module, dict[str, Recorded]] = WeakKeyDictionary()
_attributes: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
_is_inside = False

_TABLES = frozenset(nn.Module().__dict__)
"""Attributes that every module has."""


class Recorded(NamedTuple):
    """What a constructor left in one attribute of a module."""

    value: Region
    version: int
    """Of the tensor, when ``deferred_init`` ended."""
    began: int
    """A checksum of the generator's state when it began."""


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build modules inside without memory; :func:`materialize` gives them what they would hold.

    Constructors run unchanged: parameters, buffers and other tensors appear on the meta device,
    and what is done to them is recorded. The default generator ends in the state in which a
    plain constructor leaves it. Then::

        torch.manual_seed(0)  # alike on all ranks
        with fsdp2.deferred_init():
            model = GPT(config)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        fsdp2.materialize(model)

    Where a constructor asks for values (``item``, ``tolist``, a condition), what leads to them
    is computed. NumPy arrays of recorded tensors are read-only.

    Raises:
        UsageError: Something cannot be recorded: another device than the CPU, a sparse tensor,
            the address of memory. The error names the operator and the module.
    """
    global _is_inside
    if _is_inside:
        raise UsageError("deferred_init is active already; leave it before you enter it again")
    recorder, seen = Recorder(), WeakSet[nn.Module]()
    began = int(checksum(torch.get_rng_state()))
    _is_inside = True
    try:
        with _noting_modules(seen), _Attributes(recorder), _Operators(recorder):
            yield
    finally:
        _is_inside = False
    recorder.finish()
    _remember(recorder, seen, began)


def recorded_in(module: nn.Module) -> dict[str, Recorded]:
    """What ``module`` was built with, by attribute; empty if it was not built in here."""
    return _recorded.get(module, {})


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What ``module`` holds beside parameters and buffers, with regions in the place of tensors."""
    return _attributes.get(module, {})


def forget(model: nn.Module) -> None:
    """Let go of what was recorded; real tensors that constructors read are held by it."""
    for module in model.modules():
        _recorded.pop(module, None)
        _attributes.pop(module, None)


@contextmanager
def _noting_modules(seen: WeakSet[nn.Module]) -> Iterator[None]:
    """Every module that something is registered in, and every one that is registered."""

    def note(module: nn.Module, name: str, value: object) -> None:
        seen.add(module)
        if isinstance(value, nn.Module):
            seen.add(value)

    handles = [
        register_module_parameter_registration_hook(note),
        register_module_buffer_registration_hook(note),
        register_module_module_registration_hook(note),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _remember(recorder: Recorder, seen: WeakSet[nn.Module], began: int) -> None:
    """Note what every module holds; parameters with real values join the recorded ones."""
    modules = dict.fromkeys(below for module in list(seen) for below in module.modules())
    lifted: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and param.device.type == "cpu" and is_plain(param):
                if param not in lifted:
                    lifted[param] = _lifted(recorder, param)
                module._parameters[name] = lifted[param]
        found = _recorded.setdefault(module, {})
        for name, tensor in (module._parameters | module._buffers).items():
            region = _region_of(recorder, tensor)
            if tensor is not None and region is not None:
                found[name] = Recorded(region, tensor._version, began)
        _remember_attributes(recorder, module)


def _region_of(recorder: Recorder, value: Any) -> Region | None:
    return recorder.region_of(value) if isinstance(value, Tensor) else None


def _remember_attributes(recorder: Recorder, module: nn.Module) -> None:
    def noted(leaf: Any) -> Any:
        region = _region_of(recorder, leaf)
        return leaf if region is None else region

    for name, value in module.__dict__.items():
        if name not in _TABLES:
            template = map_leaves(noted, value)
            if any(isinstance(leaf, Region) for leaf in leaves(template)):
                _attributes.setdefault(module, {})[name] = template


def _lifted(recorder: Recorder, param: nn.Parameter) -> nn.Parameter:
    made = type(param)(recorder.lift(param), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


class _Operators(_torch.TorchDispatchMode):
    """Records operators."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(each.__torch_dispatch__ is not Tensor.__torch_dispatch__ for each in types):
            return NotImplemented  # its own operators are recorded, on what it consists of
        try:
            return self._recorder.run(func, args, kwargs or {})
        except CannotRecord as error:
            _refuse(str(func), str(error))


class _Attributes(TorchFunctionMode):
    """Lets recorded tensors say that they are on the CPU, and reads values that leave PyTorch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is None or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        try:
            return special(self._recorder, func, args, kwargs)
        except CannotRecord as error:
            _refuse(func.__name__, str(error))


def _say(answer: object) -> Callable[..., Any]:
    def handler(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        is_recorded = recorder.region_of(args[0]) is not None
        return answer if is_recorded else func(*args, **kwargs)

    return handler


def _read(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Values that leave PyTorch. Arrays cannot be written to: that would reach no tensor."""
    is_recorded = recorder.region_of(args[0]) is not None
    found = func(recorder.value_of(args[0]), *args[1:], **kwargs)
    if is_recorded and hasattr(found, "flags"):
        found.flags.writeable = False
    return found


def _copy(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, memo = args
    if recorder.region_of(tensor) is None or id(tensor) in memo:
        return func(*args, **kwargs)
    made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    return made


def _to(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``to``, ``cpu``, ``type_as``: a recorded tensor stays one, and is not copied to be moved."""
    tensor, *others = args
    is_recorded = recorder.region_of(tensor) is not None
    home = torch.device("meta" if is_recorded else "cpu")
    like = others[0] if others else kwargs.get("other")
    if isinstance(like, Tensor):
        is_like_recorded = recorder.region_of(like) is not None
        device = home if is_like_recorded or like.device.type == "cpu" else like.device
        kwargs = {name: value for name, value in kwargs.items() if name != "other"}
        return Tensor.to(tensor, device, like.dtype, *others[1:], **kwargs)
    if not is_recorded:
        return func(*args, **kwargs)

    def translated(value: Any) -> Any:
        is_cpu = isinstance(value, (str, torch.device)) and torch.device(value).type == "cpu"
        return home if is_cpu else value

    if func is Tensor.cpu:
        return Tensor.to(tensor, home, **kwargs)
    return func(tensor, *map(translated, others), **map_leaves(translated, kwargs))


def _set_data(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Both sides of ``a.data = b`` recorded, or both real."""
    tensor, value = args
    if recorder.region_of(tensor) is not None and recorder.region_of(value) is None:
        value = recorder.lift(value)
    elif recorder.region_of(tensor) is None and recorder.region_of(value) is not None:
        value = recorder.value_of(value)
    return func(tensor, value)


def _get_item(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, index = args
    if recorder.region_of(tensor) is not None:
        index = _index(recorder, index)
    return func(tensor, index)


def _set_item(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, index, value = args
    if recorder.region_of(tensor) is not None:
        index, value = _index(recorder, index), _data(recorder, value, tensor.dtype)
    return func(tensor, index, value)


def _index(recorder: Recorder, index: Any) -> Any:
    """PyTorch would put lists and numbers on the meta device without asking."""
    if isinstance(index, tuple):
        return tuple(_index(recorder, each) for each in index)
    is_data = isinstance(index, (list, Tensor)) or hasattr(index, "__array__")
    return _data(recorder, index) if is_data else index


def _data(recorder: Recorder, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """As a recorded tensor."""
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=dtype)
    return value if recorder.region_of(value) is not None else recorder.lift(value)


def _no_memory(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    if recorder.region_of(args[0]) is not None:
        raise CannotRecord("it needs the memory of a recorded tensor, which has none yet")
    return func(*args, **kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: _say(torch.device("cpu")),
    Tensor.is_meta.__get__: _say(False),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: _say(True),  # type: ignore[attr-defined]
    Tensor.tolist: _read,
    Tensor.numpy: _read,
    Tensor.__array__: _read,
    Tensor.__deepcopy__: _copy,
    Tensor.to: _to,
    Tensor.cpu: _to,
    Tensor.type_as: _to,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.__getitem__: _get_item,
    Tensor.__setitem__: _set_item,
    Tensor.data_ptr: _no_memory,
    Tensor.__reduce_ex__: _no_memory,
    Tensor.__dlpack__: _no_memory,
}


def _refuse(operator: str, reason: str) -> NoReturn:
    """Name the module whose code is running."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            raise UsageError(
                f"deferred_init: {operator} in {type(owner).__name__}, {frame.f_code.co_filename}:"
                f"{frame.f_lineno}, cannot be recorded: {reason}"
            )
        frame = frame.f_back
    raise UsageError(f"deferred_init: {operator} cannot be recorded: {reason}")
