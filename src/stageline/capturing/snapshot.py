"""A model left exactly as it was found: attributes, buffers, gradients, random numbers.

Capturing runs the user's model, and a run may leave traces: a counter goes up, a cache is filled, a
config learns its problem type on the first call. A snapshot holds on to the objects themselves and
notes what is in them; afterwards the same objects are back with the same contents. Parameters are
never copied.

    noted         what modules, containers and plain objects hold; which memory a parameter has
    copied        buffers and other tensors that are no parameters, arrays, states of generators
    left alone    classes, functions, what comes from torch itself or may belong to other threads
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.capturing.contents import Dict, Keeper, TensorData, is_plain, keeper_of
from stageline.capturing.randomness import kept_randomness
from stageline.capturing.writes import KeptParameters
from stageline.wording import a, a_kind

_DEEPEST = 5  # steps from a module to an object that it holds
_LONGEST = 10_000  # a longer list holds data: it is kept, but not what is in it
_MOST = 50_000  # objects far from any module; with a data set there, the walk would take seconds

# What never changes. They are told by their type at once, as there are very many.
_FIXED = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device}
    | {torch.layout, torch.memory_format, range, slice, type(keeper_of), type(len)}
)
_EMPTY = (dict, OrderedDict)
_REGISTERS = ("_modules", "_parameters", "_buffers")


@contextmanager
def preserved(model: nn.Module, *others: Any) -> Iterator[Snapshot]:
    """Leave a model, and all random numbers, as they were found, also after an error.

    So are other objects, such as the arguments of a call: a model may write to its input.

    In between the parameters have no ``.grad``: the user's gradients are put aside, where no
    backward adds to them.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> with preserved(model):
        ...     _ = model(torch.randn(4, 2))
        ...     model.last = "a batch"
        >>> model.num_batches_tracked, hasattr(model, "last")
        (tensor(0), False)
    """
    with ExitStack() as last_first:
        last_first.callback(kept_randomness())
        gradients = [(leaf, leaf.grad) for leaf in model.parameters() if leaf.is_leaf]
        last_first.callback(_set_gradients, gradients)
        snapshot = Snapshot(model, *others)
        last_first.callback(snapshot.restore)
        _set_gradients((parameter, None) for parameter, _ in gradients)
        written = KeptParameters(model)
        last_first.callback(written.restore)
        last_first.enter_context(written)
        yield snapshot


def _set_gradients(gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient


class _Held(NamedTuple):
    """An object that hangs on the model, and the last step of the way to it."""

    keeper: Keeper
    parent: _Held | None
    label: Any
    owner: nn.Module | None  # the nearest module on the way; the object itself if it is one

    @property
    def name(self) -> str:
        """What a person would write: ``layers.0.cache``."""
        held: _Held | None = self
        labels: list[str] = []
        while held is not None and held.parent is not None:
            if held.label not in _REGISTERS:
                labels.append(str(held.label))
            held = held.parent
        return ".".join(reversed(labels))


class Snapshot:
    """What a model and the objects that hang on it hold at one moment."""

    def __init__(self, model: nn.Module, *others: Any) -> None:
        self._held: list[_Held] = []
        # Every module has a dozen empty dicts for hooks: no keeper is made for them.
        self._empty: list[tuple[dict[Any, Any], _Held, Any]] = []
        self._tensors = _Tensors(model)
        self._seen: set[int] = set()
        for root in (model, *others):
            self._walk(root)

    def restore(self) -> None:
        """Put the same objects back with the same contents."""
        for empty, _, _ in self._empty:
            if empty:
                empty.clear()
        for held in self._held:
            held.keeper.restore()
        self._tensors.restore()

    def differences(self, modules: Iterable[nn.Module] | None = None) -> list[str]:
        """Name the attributes that hold a tensor, or a module, which they did not hold before.

        A tensor changed in place is not meant, nor one that has the memory of the tensor that was
        in its place.

        Args:
            modules: Look only at what these modules hold; all by default.

        Example:
            >>> model = nn.Sequential(nn.ReLU())
            >>> with preserved(model) as snapshot:
            ...     model[0].cache = [torch.zeros(2)]
            ...     snapshot.differences()
            ['0.cache: attribute set to a list with a tensor']
        """
        wanted = None if modules is None else {id(module) for module in modules}
        filled = [
            _Held(_Filled(empty), parent, label, parent.owner)
            for empty, parent, label in self._empty
            if empty
        ]
        return [
            f"{name}: attribute set to {what}"
            for held in [*self._held, *filled]
            if held.owner is not None and (wanted is None or id(held.owner) in wanted)
            for name, what in _news(held)
        ]

    def _walk(self, root: Any) -> None:
        """Note all that hangs on an object, what is near first."""
        self._seen.add(id(root))
        queue: deque[tuple[Any, _Held | None, Any, int]] = deque([(root, None, "", 0)])
        far = 0
        while queue:
            value, parent, label, depth = queue.popleft()
            far += depth > 1
            keeper = keeper_of(value) if far <= _MOST else None
            if keeper is None:
                continue
            is_module = isinstance(value, nn.Module)
            held = _Held(keeper, parent, label, value if is_module else parent and parent.owner)
            self._held.append(held)
            depth = 1 if is_module else depth + 1
            if depth <= _DEEPEST and len(keeper.saved) <= _LONGEST:
                queue.extend((inner, held, key, depth) for key, inner in self._sorted_out(held))

    def _sorted_out(self, held: _Held) -> Iterator[tuple[Any, Any]]:
        """Yield what is to be walked of an object's contents; keep the simple rest at once."""
        for key, inner in held.keeper.saved.items():
            if type(inner) in _FIXED or id(inner) in self._seen:
                continue
            self._seen.add(id(inner))
            if type(inner) in _EMPTY and not inner:
                self._empty.append((inner, held, key))
            elif isinstance(inner, Tensor):
                self._tensors.add(inner)
            else:
                yield key, inner


class _Filled(Dict):
    """A dict that was empty."""

    def __init__(self, target: dict[Any, Any]) -> None:
        super().__init__(target)
        self.saved = {}


class _Tensors:
    """The tensors that hang on a model."""

    def __init__(self, model: nn.Module) -> None:
        self._keepers: dict[int, TensorData] = {}
        self._parameters: set[int] = set()  # where their memory is
        for parameter in model.parameters():
            self._add(parameter, copied=False)
            if is_plain(parameter) and not nn.parameter.is_lazy(parameter):
                self._parameters.add(parameter.untyped_storage().data_ptr())
        for buffer in model.buffers():
            self._add(buffer, copied=True)

    def add(self, tensor: Tensor) -> None:
        """Keep a tensor that is a plain attribute; not its values if they are a parameter's."""
        copied = not isinstance(tensor, nn.Parameter) and is_plain(tensor)
        if copied and tensor.untyped_storage().data_ptr() in self._parameters:
            copied = False
        self._add(tensor, copied=copied)

    def restore(self) -> None:
        for keeper in self._keepers.values():
            keeper.restore()

    def _add(self, tensor: Tensor, *, copied: bool) -> None:
        if id(tensor) not in self._keepers:
            self._keepers[id(tensor)] = TensorData(tensor, copied=copied)


def _news(held: _Held) -> Iterator[tuple[str, str]]:
    """Yield name and description of what an object holds now and is news."""
    keeper = held.keeper
    changed = [
        (label, value, keeper.saved.get(label))
        for label, value in keeper.now().items()
        if type(value) not in _FIXED and value is not keeper.saved.get(label)
    ]
    if not changed:
        return
    known = {id(tensor) for value in keeper.saved.values() for _, tensor in _found(value)}
    for label, value, before in changed:
        for kind, tensor in _found(value):
            if id(tensor) not in known and not _is_alias(tensor, before):
                name = _Held(keeper, held, label, held.owner).name
                what = a(kind) if value is tensor else f"{a_kind(value)} with {a(kind)}"
                yield name, what
                break


def _is_alias(tensor: Any, before: Any) -> bool:
    """Whether a tensor is the one before by another name, as ``self.x = self.x.to(device)`` does.

    On another memory it is not: a later reader would get what another stage computed.
    """
    return (
        isinstance(tensor, Tensor)
        and isinstance(before, Tensor)
        and is_plain(tensor)
        and is_plain(before)
        and tensor.dtype == before.dtype
        and tensor.device == before.device
        and tensor.is_set_to(before)
    )


def _found(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and modules in a value, with what to call them."""
    if type(value) in _FIXED:
        return
    if isinstance(value, Tensor):
        yield "tensor", value
    elif isinstance(value, nn.Module):
        yield "module", value
    elif depth < _DEEPEST:
        keeper = keeper_of(value)
        for inner in keeper.saved.values() if keeper is not None else ():
            yield from _found(inner, depth + 1)
