"""A twin of a method in which the layers of its module are called directly.

    def forward(self, x):                          def forward(self, x):
        return F.relu(self.norm(self.conv(x)))         if <somebody listens>:
                                                           return <the module>(x)
                                                       return F.relu(<norm>(<conv>(x)))

All the rest of the code is run by Python as it stands, on the user's own lines: what it prints,
decides and changes stays what it was. Code is left alone unless its source gives, when compiled,
the very instructions that the method has.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from stageline.torch_private import MODULE_HOOKS, hooks_of

Call = Callable[..., Any]
Path = tuple[str, ...]
"""Attributes after ``self``: ``("conv",)`` in ``self.conv(x)``."""

_PREFIX = "_stageline_"
_MODULE = f"{_PREFIX}module"
_HOOKS = [f"{_PREFIX}hooks{index}" for index in range(len(MODULE_HOOKS))]
# They would see the names that the twin has and the method has not.
_LOOK_AROUND = frozenset(("locals", "vars", "dir", "eval", "exec"))
_OF_OTHER_KINDS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)

_AS_TEXT = __future__.annotations.compiler_flag
_CHANGES = (ast.Store, ast.Del)

_read: WeakKeyDictionary[FunctionType, Method | None] = WeakKeyDictionary()


def read(function: FunctionType, source: str | None = None) -> Method | None:
    """Return the code of a method, read once for all modules of a class; None if it is left alone.

    Args:
        function: The method.
        source: Its text, where it is in no file.
    """
    if function not in _read:
        _read[function] = _method(function, source)
    return _read[function]


def _method(function: FunctionType, source: str | None) -> Method | None:
    code = function.__code__
    if code.co_freevars or code.co_kwonlyargcount or code.co_flags & _OF_OTHER_KINDS:
        return None
    if not code.co_argcount or _LOOK_AROUND & set(code.co_names):
        return None
    if "getattr" in function.__globals__:  # Python's own is meant below
        return None
    definition = _definition(function, source)
    if definition is None:
        return None
    method = Method(definition)
    is_same = _is_same(code, method.compiled(function))
    return method if is_same and method.keeps_itself() else None


def _definition(function: FunctionType, source: str | None) -> ast.FunctionDef | None:
    """Return the syntax tree of a function, on the lines that it has in its file."""
    first = function.__code__.co_firstlineno
    try:
        text = inspect.getsource(function) if source is None else source.strip()
        # Not dedented: a traceback points at columns.
        is_inside = text[:1].isspace()
        tree = ast.parse(f"if True:\n{text}" if is_inside else text)
    except (OSError, TypeError, SyntaxError):  # typed in, made at run time, or changed since
        return None
    ast.increment_lineno(tree, first - (2 if is_inside else 1))
    top = tree.body[0]
    if isinstance(top, ast.If):
        top = top.body[0]
    if not isinstance(top, ast.FunctionDef) or top.decorator_list:
        return None
    return top


def _is_same(one: CodeType, other: CodeType) -> bool:
    names = ("co_code", "co_consts", "co_names", "co_varnames", "co_cellvars", "co_argcount")
    return all(getattr(one, name) == getattr(other, name) for name in names)


class Method:
    """The code of a method.

    Attributes:
        paths: What it calls of ``self``.
    """

    def __init__(self, definition: ast.FunctionDef) -> None:
        self._definition = definition
        self._itself = _arguments(definition)[0].arg
        calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
        found = [_path(call.func, self._itself) for call in calls]
        self.paths = tuple(dict.fromkeys(path for path in found if path))
        self._makers: dict[tuple[Path, ...], Call] = {}

    def compiled(self, function: FunctionType) -> CodeType:
        """Return what the text of the method gives."""
        # What the file has imported is compiled in another way: torch.relu(x) is no method.
        known = function.__globals__
        names = function.__code__.co_names
        imported = [name for name in names if isinstance(known.get(name), ModuleType)]
        imports = [ast.Import([ast.alias(name) for name in imported])] if imported else []
        code = _compile(ast.Module([*imports, self._definition], []), function)
        return next(each for each in code.co_consts if isinstance(each, CodeType))

    def keeps_itself(self) -> bool:
        """Whether ``self`` means the module everywhere, and nothing that is called is set."""
        nodes = list(ast.walk(self._definition))
        arguments = [node.arg for node in nodes if isinstance(node, ast.arg)]
        changed = [node for node in nodes if isinstance(getattr(node, "ctx", None), _CHANGES)]
        names = {node.id for node in changed if isinstance(node, ast.Name)}
        attributes = {node.attr for node in changed if isinstance(node, ast.Attribute)}
        called = {name for path in self.paths for name in path}
        is_module = arguments.count(self._itself) == 1 and self._itself not in names
        return is_module and called.isdisjoint(attributes)

    def twin(self, function: FunctionType, module: nn.Module, calls: Mapping[Path, Call]) -> Call:
        """Return the twin of the method for a module.

        Args:
            function: The method.
            module: Whose it is.
            calls: What to call instead of some paths.
        """
        paths = tuple(calls)
        if paths not in self._makers:
            self._makers[paths] = self._maker(function, paths)
        made = self._makers[paths](module, *hooks_of(module), *calls.values())
        made.__defaults__ = function.__defaults__
        made.__qualname__ = function.__qualname__
        return MethodType(made, module)

    def _maker(self, function: FunctionType, paths: tuple[Path, ...]) -> Call:
        """Return what makes twins; the names in them that the method has not are its arguments."""
        names = {path: f"{_PREFIX}call{index}" for index, path in enumerate(paths)}
        twin = _Direct(self._itself, names).visit(copy.deepcopy(self._definition))
        _without_what_is_evaluated_around(twin)
        arguments = ", ".join(argument.arg for argument in _arguments(twin)[1:])
        added = (
            f"def make({', '.join([_MODULE, *_HOOKS, *names.values()])}):\n"
            f"    if {' or '.join(_HOOKS)}: return {_MODULE}({arguments})\n"
            f"    return {twin.name}"
        )
        maker = ast.parse(added).body[0]
        assert isinstance(maker, ast.FunctionDef)
        listens, returned = maker.body
        for node in ast.walk(listens):
            ast.copy_location(node, twin)
        twin.body.insert(0, listens)
        maker.body = [twin, returned]
        found: dict[str, Any] = {}
        exec(_compile(ast.Module([maker], []), function), function.__globals__, found)
        made: Call = found["make"]
        return made


class _Direct(ast.NodeTransformer):
    """Replaces what is called by other names."""

    def __init__(self, itself: str, names: Mapping[Path, str]) -> None:
        self._itself = itself
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = self._names.get(_path(node.func, self._itself))
        if name is not None:
            node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
        return node


def _path(callee: ast.expr, itself: str) -> Path:
    """Return the attributes between ``self`` and what is called; none if it is something else."""
    path: list[str] = []
    while True:
        match callee:
            case ast.Attribute(value=holder, attr=name):
                pass
            # As recorded code has it for layers that bear numbers.
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[holder, ast.Constant(value=str(name))],
                keywords=[],
            ):
                pass
            case ast.Name(id=name) if name == itself:
                return tuple(path)
            case _:
                return ()
        path.insert(0, name)
        callee = holder


def _without_what_is_evaluated_around(definition: ast.FunctionDef) -> None:
    """Drop what was evaluated when the method was defined, and is not to be evaluated again."""
    definition.args.defaults = []
    definition.returns = None
    for argument in _arguments(definition):
        argument.annotation = None


def _arguments(definition: ast.FunctionDef) -> list[ast.arg]:
    return definition.args.posonlyargs + definition.args.args


def _compile(module: ast.Module, function: FunctionType) -> CodeType:
    ast.fix_missing_locations(module)
    before = function.__code__
    flags = before.co_flags & _AS_TEXT  # of annotations, in functions inside
    code: CodeType = compile(module, before.co_filename, "exec", flags, dont_inherit=True)
    return code
