"""A twin of a method in which the layers of its module are called directly.

    def forward(self, x):                 def forward(self, x):
        return self.norm(self.conv(x))        return <norm or self.norm>(<conv or self.conv>(x))

``self.norm`` it is as soon as somebody listens to that layer. All the rest of the code is run by
Python as it stands, on the user's own lines: what it prints, decides and changes stays what it was.
Code is left alone unless its source gives, when compiled, the very instructions that it has.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from stageline.torch_private import MODULE_HOOKS, hooks_of

Call = Callable[..., Any]
Path = tuple[str, ...]
"""Attributes after ``self``: ``("conv",)`` in ``self.conv(x)``."""

_PREFIX = "_stageline_"
# They would see the names that the twin has and the method has not.
_LOOK_AROUND = frozenset(("locals", "vars", "dir", "eval", "exec"))
_OF_OTHER_KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_AS_TEXT = __future__.annotations.compiler_flag
_CHANGES = (ast.Store, ast.Del)

_read: WeakKeyDictionary[FunctionType, tuple[CodeType, Method | None]] = WeakKeyDictionary()


class Layer(NamedTuple):
    """What stands at the end of a path.

    Attributes:
        call: What to call instead of it.
        module: The layer.
        holder: The module that holds it.
        takes_one: Whether it is only called in this way with one argument, which has no name.
    """

    call: Call
    module: nn.Module
    holder: nn.Module
    takes_one: bool

    def values(self) -> tuple[Any, ...]:
        """Return what a twin is given of it."""
        return self.call, self.module, self.holder._modules, *hooks_of(self.module)


def read(function: FunctionType, source: str | None = None) -> Method | None:
    """Return the code of a method, read once for all modules of a class; None if it is left alone.

    Args:
        function: The method.
        source: Its text, where it is in no file.
    """
    code, method = _read.get(function, (None, None))
    if code is not function.__code__:  # which reloading changes
        try:
            method = _method(function, source)
        except Exception:  # typed in, half edited, too deep: whatever it is, it can be called
            method = None
        _read[function] = function.__code__, method
    return method


def _method(function: FunctionType, source: str | None) -> Method | None:
    code = function.__code__
    if code.co_freevars or not code.co_argcount or code.co_flags & _OF_OTHER_KINDS:
        return None
    if _LOOK_AROUND & _names(code) or "getattr" in function.__globals__:
        return None
    definition = _definition(function, source)
    if definition is None or not any(_is_same(code, c) for c in _compiled(definition, function)):
        return None
    method = Method(definition)
    return method if method.keeps_itself() else None


def _names(code: CodeType) -> set[str]:
    """Return the names that code uses, with those of the functions in it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _definition(function: FunctionType, source: str | None) -> ast.FunctionDef | None:
    """Return the syntax tree of a function, on the lines that it has in its file."""
    text = inspect.getsource(function) if source is None else source.strip()
    # Not dedented: a traceback points at columns.
    is_inside = text[:1].isspace()
    tree = ast.parse(f"if True:\n{text}" if is_inside else text)
    ast.increment_lineno(tree, function.__code__.co_firstlineno - (2 if is_inside else 1))
    top = tree.body[0]
    if isinstance(top, ast.If):
        top = top.body[0]
    if not isinstance(top, ast.FunctionDef) or top.decorator_list:
        return None
    return top


def _compiled(definition: ast.FunctionDef, function: FunctionType) -> list[CodeType]:
    """Return what the text of a method may give.

    What a file has imported is compiled in another way: torch.relu(x) calls no method then.
    """
    names, known = function.__code__.co_names, function.__globals__
    modules = [name for name in names if isinstance(known.get(name), ModuleType)]
    made = []
    for imported in (modules, []):
        imports = [ast.Import([ast.alias(name) for name in imported])] if imported else []
        code = _compile(ast.Module([*imports, definition], []), function)
        made.append(next(each for each in code.co_consts if isinstance(each, CodeType)))
    return made


def _is_same(one: CodeType, other: CodeType) -> bool:
    # Python's own comparison knows 2 from 2.0. Recorded code has been compiled on other lines.
    return one == other.replace(co_firstlineno=one.co_firstlineno, co_linetable=one.co_linetable)


class Method:
    """The code of a method.

    Attributes:
        paths: What it calls of ``self``.
        entrance: What it calls with its first argument, if nothing else ever happens to that.
    """

    def __init__(self, definition: ast.FunctionDef) -> None:
        self._definition = definition
        self._itself = _arguments(definition)[0].arg
        self._makers: dict[Any, CodeType] = {}
        calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
        found = [_path(call.func, self._itself) for call in calls]
        self.paths = tuple(dict.fromkeys(path for path in found if path))
        self.entrance = _entrance(definition, self._itself)

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

    def twin(self, function: FunctionType, module: nn.Module, layers: Mapping[Path, Layer]) -> Call:
        """Return the twin of the method for a module.

        Args:
            function: The method.
            module: Whose it is.
            layers: What some of the paths lead to.
        """
        checks = self._may_change(layers)
        if checks:  # of others, only the last holder is looked at
            layers = {path: layer for path, layer in layers.items() if len(path) == 1}
        kinds = tuple((path, layer.takes_one) for path, layer in layers.items())
        if (kinds, checks) not in self._makers:
            self._makers[kinds, checks] = self._maker(function, dict(kinds), checks)
        # Only code is kept: a function would keep the names around it, and so itself, for ever.
        make = FunctionType(self._makers[kinds, checks], function.__globals__)
        made = make(*(value for layer in layers.values() for value in layer.values()))
        made.__defaults__ = function.__defaults__
        made.__kwdefaults__ = function.__kwdefaults__
        made.__name__, made.__qualname__ = function.__name__, function.__qualname__
        return MethodType(made, module)

    def _maker(self, function: FunctionType, kinds: Mapping[Path, bool], checks: bool) -> CodeType:
        """Return what makes twins; the names in them that the method has not are its arguments."""
        sites = {
            path: _Site(index, path, takes_one, checks=checks)
            for index, (path, takes_one) in enumerate(kinds.items())
        }
        twin = _Direct(self._itself, sites).visit(copy.deepcopy(self._definition))
        _without_what_is_evaluated_around(twin)
        twin.name = f"{_PREFIX}twin"  # its own name may mean something else in the file
        names = [name for site in sites.values() for name in site.names]
        maker = ast.parse(f"def make({', '.join(names)}): return {twin.name}").body[0]
        assert isinstance(maker, ast.FunctionDef)
        maker.body.insert(0, twin)
        code = _compile(ast.Module([maker], []), function)
        made = next(each for each in code.co_consts if isinstance(each, CodeType))
        return _renamed(made, twin.name, function.__code__)

    def _may_change(self, layers: Mapping[Path, Layer]) -> bool:
        """Whether other code that gets hold of ``self`` may give it other layers meanwhile."""
        if any(path not in layers for path in self.paths):
            return True
        nodes = list(ast.walk(self._definition))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        held = [node.value for node in attributes]
        return any(node.attr in ("_modules", "__dict__") for node in attributes) or any(
            isinstance(node, ast.Name) and node.id == self._itself and node not in held
            for node in nodes
        )


class _Site:
    """A place where a layer is called: what stands there instead.

    Attributes:
        names: Those that it needs.
    """

    def __init__(self, index: int, path: Path, takes_one: bool, *, checks: bool) -> None:
        names = ("call", "module", "layers", *(f"hooks{i}" for i in range(len(MODULE_HOOKS))))
        self.names = [f"{_PREFIX}{name}_{index}" for name in names]
        self._takes_one = takes_one
        call, module, layers, *hooks = self.names
        listens = f"({' or '.join(hooks)})"
        is_same = f" and {layers}.get({path[-1]!r}) is {module}" if checks else ""
        self._text = f"{call} if not {listens}{is_same} else None"

    def callee(self, node: ast.Call) -> ast.expr:
        """Return what is called there: the layer's function, or what was called before."""
        is_one = len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)
        if self._takes_one and (not is_one or node.keywords):
            return node.func
        choice = ast.parse(self._text, mode="eval").body
        assert isinstance(choice, ast.IfExp)
        for each in ast.walk(choice):
            ast.copy_location(each, node.func)
        choice.orelse = node.func
        return choice


class _Direct(ast.NodeTransformer):
    """Replaces what is called."""

    def __init__(self, itself: str, sites: Mapping[Path, _Site]) -> None:
        self._itself = itself
        self._sites = sites

    def visit_Call(self, node: ast.Call) -> ast.AST:
        site = self._sites.get(_path(node.func, self._itself))
        self.generic_visit(node)
        if site is not None:
            node.func = site.callee(node)
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


_AGAIN = (
    *(ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
)


def _entrance(definition: ast.FunctionDef, itself: str) -> Path:
    """Return what is called with the first argument after ``self``; nothing if more is done to it.

    A place in the code that may run again, or later, counts twice.
    """
    if len(_arguments(definition)) < 2:
        return ()
    name = _arguments(definition)[1].arg
    found: list[Path] = []
    num_reads = 0
    left: list[tuple[ast.AST, int]] = [(node, 1) for node in definition.body]
    while left:
        node, times = left.pop()
        match node:
            case ast.Name(id=read, ctx=ast.Load()) if read == name:
                num_reads += times
            case ast.AugAssign(target=ast.Name(id=changed)) if changed == name:
                num_reads += 2
            case ast.Call(args=[ast.Name(id=given)], keywords=[]) if given == name:
                found.append(_path(node.func, itself))
        times = 2 if isinstance(node, _AGAIN) else times
        left.extend((inner, times) for inner in ast.iter_child_nodes(node))
    return found[0] if found and num_reads == 1 else ()


def _without_what_is_evaluated_around(definition: ast.FunctionDef) -> None:
    """Drop what was evaluated when the method was defined, and is not to be evaluated again."""
    given = definition.args
    given.defaults = []
    given.kw_defaults = [None] * len(given.kwonlyargs)
    definition.returns = None
    for argument in (*_arguments(definition), *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None:
            argument.annotation = None


def _arguments(definition: ast.FunctionDef) -> list[ast.arg]:
    return definition.args.posonlyargs + definition.args.args


def _renamed(maker: CodeType, name: str, before: CodeType) -> CodeType:
    """Return a maker whose twins bear the names that a traceback should show."""
    names: dict[str, Any] = {"co_name": before.co_name}
    if hasattr(before, "co_qualname"):  # since Python 3.11
        names["co_qualname"] = before.co_qualname
    consts = tuple(
        each.replace(**names) if isinstance(each, CodeType) and each.co_name == name else each
        for each in maker.co_consts
    )
    return maker.replace(co_consts=consts)


def _compile(module: ast.Module, function: FunctionType) -> CodeType:
    ast.fix_missing_locations(module)
    before = function.__code__
    flags = before.co_flags & _AS_TEXT  # of annotations, in functions inside
    code: CodeType = compile(module, before.co_filename, "exec", flags, dont_inherit=True)
    return code
