"""Numbers of a recording: what opened code computes with them is recorded.

A plain ``int`` would be baked in, and a subclass of ``int`` is read by C code without a question.
A subclass of ``torch.SymInt`` that calls itself an ``int`` passes ``isinstance`` and torch's
argument parser, and every conversion to a plain number comes back here:

    n = x.shape[1]      Size(16), a node of the graph
    n * 2, n // 2       a Size again, recorded
    n == 1, n > 4       a plain bool, and a guard on the outcome
    range(n), lst[n]    a plain number, and a guard on the value
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch


class SymbolHost(Protocol):
    """The recorder, as symbols see it."""

    def compute(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Record a computation with symbols; return a symbol, or a bool that is decided at once."""

    def decide(self, symbol: Any, outcome: Any) -> Any:
        """Note that the code has used the plain value of a symbol; return it."""


def is_symbol(value: object) -> bool:
    """Whether a value is a symbol; ``isinstance`` would believe what the symbol says of itself."""
    return issubclass(type(value), (Size, Real))


def plain(value: Any) -> Any:
    """Return the plain value behind a symbol, without a guard."""
    return value.value if is_symbol(value) else value


class _Node:
    """The few questions that torch's C++ side asks of the node of a symbolic number."""

    def __init__(self, symbol: Any, kind: type) -> None:
        self._symbol = symbol
        self._kind = kind

    def is_int(self) -> bool:
        return self._kind is int

    def is_float(self) -> bool:
        return self._kind is float

    def is_bool(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def nested_int(self) -> None:
        return None

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def constant_int(self) -> None:
        return None

    def constant_bool(self) -> None:
        return None

    def clone(self) -> _Node:
        return self

    def guard_int(self, file: str, line: int) -> int:
        return int(self._symbol)

    def guard_float(self, file: str, line: int) -> float:
        return float(self._symbol)

    def guard_bool(self, file: str, line: int) -> bool:
        return bool(self._symbol)

    def guard_size_oblivious(self, file: str, line: int) -> bool:
        return bool(self._symbol)

    def expect_true(self, file: str, line: int) -> bool:
        return bool(self._symbol)

    def expect_size(self, file: str, line: int) -> bool:
        return int(self._symbol) >= 0

    def int_(self) -> int:
        return int(self._symbol)

    def float_(self) -> float:
        return float(self._symbol)

    def bool_(self) -> bool:
        return bool(self._symbol)


def _arithmetic(name: str) -> Any:
    function = getattr(operator, name)

    def record(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        return self.host.compute(function, self, other)

    return record


def _reflected(name: str) -> Any:
    function = getattr(operator, name)

    def record(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        return self.host.compute(function, other, self)

    return record


def _comparison(name: str) -> Any:
    function = getattr(operator, name)

    def compare(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        return self.host.compute(function, self, other)

    return compare


def _is_number(value: object) -> bool:
    return is_symbol(value) or type(value) in (int, float, bool)


class _Symbol:
    """What all symbols share: the recorder, the node in its graph, and the value in this run."""

    host: SymbolHost
    fx_node: Any
    value: Any

    __add__ = _arithmetic("add")
    __radd__ = _reflected("add")
    __sub__ = _arithmetic("sub")
    __rsub__ = _reflected("sub")
    __mul__ = _arithmetic("mul")
    __rmul__ = _reflected("mul")
    __floordiv__ = _arithmetic("floordiv")
    __rfloordiv__ = _reflected("floordiv")
    __truediv__ = _arithmetic("truediv")
    __rtruediv__ = _reflected("truediv")
    __mod__ = _arithmetic("mod")
    __rmod__ = _reflected("mod")
    __pow__ = _arithmetic("pow")
    __rpow__ = _reflected("pow")
    __and__ = _arithmetic("and_")
    __rand__ = _reflected("and_")
    __or__ = _arithmetic("or_")
    __ror__ = _reflected("or_")
    __xor__ = _arithmetic("xor")
    __rxor__ = _reflected("xor")
    __lshift__ = _arithmetic("lshift")
    __rlshift__ = _reflected("lshift")
    __rshift__ = _arithmetic("rshift")
    __rrshift__ = _reflected("rshift")
    __eq__ = _comparison("eq")
    __ne__ = _comparison("ne")
    __lt__ = _comparison("lt")
    __le__ = _comparison("le")
    __gt__ = _comparison("gt")
    __ge__ = _comparison("ge")

    def __neg__(self) -> Any:
        return self.host.compute(operator.neg, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self.host.compute(operator.abs, self)

    def __invert__(self) -> Any:
        return self.host.compute(operator.invert, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __hash__(self) -> int:
        return hash(self.host.decide(self, self.value))

    def __bool__(self) -> bool:
        return bool(self.host.compute(operator.truth, self))

    def __int__(self) -> int:
        return int(self.host.decide(self, self.value))

    def __float__(self) -> float:
        return float(self.host.decide(self, self.value))

    def __complex__(self) -> complex:
        return complex(self.host.decide(self, self.value))

    def __str__(self) -> str:
        return str(self.host.decide(self, self.value))

    def __format__(self, spec: str) -> str:
        return format(self.host.decide(self, self.value), spec)

    def __repr__(self) -> str:
        return repr(self.host.decide(self, self.value))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.host.decide(self, self.value), digits)

    def __trunc__(self) -> Any:
        return self.host.compute(int, self)

    def __floor__(self) -> Any:
        return self.host.decide(self, self.value).__floor__()

    def __ceil__(self) -> Any:
        return self.host.decide(self, self.value).__ceil__()

    def __reduce__(self) -> Any:
        value = self.host.decide(self, self.value)
        return (type(value), (value,))

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self


class Size(_Symbol, torch.SymInt):
    """A whole number that depends on the input: a size, a count, an item."""

    def __init__(self, host: SymbolHost, fx_node: Any, value: int) -> None:
        self.host = host
        self.fx_node = fx_node
        self.value = value
        self.node = _Node(self, int)

    @property  # isinstance(n, int) asks this
    def __class__(self) -> type:
        return int

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("the class of a symbol cannot be set")

    def __index__(self) -> int:
        return int(self.host.decide(self, self.value))

    __hash__ = _Symbol.__hash__

    @property
    def real(self) -> Any:
        return self

    @property
    def imag(self) -> int:
        return 0

    @property
    def numerator(self) -> Any:
        return self

    @property
    def denominator(self) -> int:
        return 1

    def bit_length(self) -> int:
        return int(self).bit_length()

    def is_integer(self) -> bool:
        return True


class Real(_Symbol, torch.SymFloat):
    """A number with a point that depends on the input: an item of a tensor, a quotient of sizes."""

    def __init__(self, host: SymbolHost, fx_node: Any, value: float) -> None:
        self.host = host
        self.fx_node = fx_node
        self.value = value
        self.node = _Node(self, float)

    @property  # isinstance(n, float) asks this
    def __class__(self) -> type:
        return float

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("the class of a symbol cannot be set")

    __hash__ = _Symbol.__hash__

    def is_integer(self) -> bool:
        return float(self).is_integer()


def symbol(host: SymbolHost, fx_node: Any, value: Any) -> Any:
    """Return the symbol for a plain number."""
    kind = {int: Size, float: Real}[type(value)]
    return kind(host, fx_node, value)
