"""What torch cannot show a function mode, made visible for the time of a recording.

Everything is put back afterwards, and other threads are let through at once.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stageline.capturing.places import where
from stageline.capturing.recorder import Recorder
from stageline.capturing.values import flatten
from stageline.errors import CaptureError
from stageline.torch_private import (
    CHECKPOINT_GENERATOR,
    DisableTorchFunction,
    checkpoint_module,
    functorch_apis,
)
from stageline.wording import a_kind

_MISSING = object()


@contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """Show a recorder what it would not see: flags, len(), regions, custom functions, writes."""
    with ExitStack() as stack:
        for patch in (
            _training_flag,
            _attribute_writes,
            _len,
            _autocast,
            _custom_functions,
            _vmap,
            _checkpoint,
            _python_random,
            _grad_questions,
            _enable_grad,
            _saved_tensors_hooks,
        ):
            stack.enter_context(patch(recorder))
        yield


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(holder).get(name, _MISSING)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


@contextmanager
def _training_flag(recorder: Recorder) -> Iterator[None]:
    """``self.training`` in opened code is a decision: train and eval are two recordings."""

    def read(module: nn.Module) -> Any:
        value = module.__dict__["training"]
        if not recorder.is_open or not isinstance(value, bool):
            return value
        if not recorder.bindings.is_new(module):
            recorder.guard(recorder.training_node(module), value)
        return value

    def write(module: nn.Module, value: Any) -> None:
        if recorder.is_open and not recorder.bindings.is_new(module):
            raise CaptureError(
                f"{where()}: the code calls train() or eval() in forward, which would not reach "
                "other stages: do it outside of the model"
            )
        module.__dict__["training"] = value

    with _replaced(nn.Module, "training", property(read, write)):
        yield


@contextmanager
def _attribute_writes(recorder: Recorder) -> Iterator[None]:
    """A value that opened code stores on a module would not be there in another stage."""
    original = nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if recorder.is_open and name != "training" and not recorder.bindings.is_new(module):
            old = getattr(module, name, _MISSING)
            # transformers notes that it has installed the hooks that collect hidden states.
            if not _is_harmless(old, value) and name != "_output_capturing_hooks_installed":
                path = recorder.names.path_of(module)
                raise CaptureError(
                    f"{where()}: the code stores {a_kind(value)} in "
                    f"{path + '.' if path else 'self.'}{name}, which other stages would not see: "
                    "return it, or change a buffer in place"
                )
        original(module, name, value)

    with _replaced(nn.Module, "__setattr__", set_attribute):
        yield


def _is_harmless(old: Any, new: Any) -> bool:
    if old is new:
        return True
    with DisableTorchFunction():
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            same_place = old.data_ptr() == new.data_ptr() and old.device == new.device
            return same_place and old.shape == new.shape and old.dtype == new.dtype
        if any(isinstance(leaf, Tensor) for leaf in flatten((old, new))[0]):
            return False
        try:
            return type(old) is type(new) and bool(old == new)
        except Exception:
            return False


@contextmanager
def _len(recorder: Recorder) -> Iterator[None]:
    """The builtin insists on a plain int; opened code gets the symbol."""
    original = builtins.len

    def length(value: Any) -> Any:
        if isinstance(value, Tensor) and recorder.is_open and recorder.bindings.varies(value):
            with DisableTorchFunction():
                original(value)  # raises for a tensor without dimensions
                return recorder.size_of(value, 0)
        return original(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = original


@contextmanager
def _autocast(recorder: Recorder) -> Iterator[None]:
    kind = torch.amp.autocast_mode.autocast
    enter, leave = kind.__enter__, kind.__exit__

    def entering(self: Any) -> Any:
        result = enter(self)  # type: ignore[no-untyped-call]  # untyped in torch
        if recorder.is_open:
            recorder.regions.enter_autocast(self)
            self._recorded = True
        return result

    def leaving(self: Any, *error: Any) -> Any:
        if self.__dict__.pop("_recorded", False):
            recorder.regions.leave_autocast()
        return leave(self, *error)

    with _replaced(kind, "__enter__", entering), _replaced(kind, "__exit__", leaving):
        yield


@contextmanager
def _custom_functions(recorder: Recorder) -> Iterator[None]:
    """A custom autograd function is one node: recorded inside, it would lose its backward."""
    original = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_open:
            return original(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run, _, *inputs = args
            with _checkpointed(recorder):
                return run(*inputs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return original(cls, *args, **kwargs)

        return recorder.call_opaque(call, cls.__name__, args, kwargs)

    with _replaced(torch.autograd.Function, "apply", classmethod(apply)):
        yield


@contextmanager
def _vmap(recorder: Recorder) -> Iterator[None]:
    """A vmap is one node: inside it the tensors are not those of the run."""
    original: Any = vars(functorch_apis)["vmap_impl"]

    def vmap(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_open:
            return original(func, *args, **kwargs)
        return recorder.call_opaque(original, "vmap", (func, *args), kwargs)

    with _replaced(functorch_apis, "vmap_impl", vmap):
        yield


@contextmanager
def _checkpoint(recorder: Recorder) -> Iterator[None]:
    """Checkpointing in opened code runs as usual, but a replay does not know of it."""
    original = vars(checkpoint_module)[CHECKPOINT_GENERATOR]

    def generator(*args: Any, **kwargs: Any) -> Any:
        if not recorder.is_open:
            yield from original(*args, **kwargs)
            return
        with _checkpointed(recorder):
            yield from original(*args, **kwargs)

    with _replaced(checkpoint_module, CHECKPOINT_GENERATOR, generator):
        yield


@contextmanager
def _checkpointed(recorder: Recorder) -> Iterator[None]:
    """What runs twice in the plain model runs once in a replay: it must not change a buffer."""
    recorder.note_checkpoint()
    with DisableTorchFunction():
        before = [(buffer, buffer._version) for buffer in recorder.names.model.buffers()]
    yield
    with DisableTorchFunction():
        if any(buffer._version != version for buffer, version in before):
            raise CaptureError(
                f"{where()}: a buffer is changed inside a checkpoint, which runs twice: put the "
                "checkpoint into a module that is not cut"
            )


@contextmanager
def _grad_questions(recorder: Recorder) -> Iterator[None]:
    """Code may decide by whether gradients are enabled: then each way is a recording."""

    inference = torch.is_inference_mode_enabled

    def refused() -> bool:
        if recorder.is_open:
            raise CaptureError(
                f"{where()}: the code asks whether inference mode is on, which a recording cannot "
                "follow: ask torch.is_grad_enabled()"
            )
        return inference()

    def asked(original: Callable[[], bool]) -> Callable[[], bool]:
        def question() -> bool:
            recorder.asks_for_grad |= recorder.is_open
            return original()

        return question

    with ExitStack() as stack:
        asks = asked(torch.is_grad_enabled)
        stack.enter_context(_replaced(torch, "is_grad_enabled", asks))
        stack.enter_context(_replaced(torch, "is_inference_mode_enabled", refused))
        yield


@contextmanager
def _enable_grad(recorder: Recorder) -> Iterator[None]:
    """Gradients enabled where they are enabled anyway: only the scope itself shows it."""
    kind = torch.enable_grad
    enter, leave = kind.__enter__, kind.__exit__

    def entering(self: Any) -> Any:
        enter(self)
        if recorder.is_open:
            recorder.regions.num_enabled += 1
            self._recorded = True

    def leaving(self: Any, *error: Any) -> Any:
        if self.__dict__.pop("_recorded", False):
            recorder.regions.num_enabled -= 1
        return leave(self, *error)

    with _replaced(kind, "__enter__", entering), _replaced(kind, "__exit__", leaving):
        yield


@contextmanager
def _saved_tensors_hooks(recorder: Recorder) -> Iterator[None]:
    kind = torch.autograd.graph.saved_tensors_hooks
    enter = kind.__enter__

    def entering(self: Any) -> Any:
        if recorder.is_open and type(self) in (kind, torch.autograd.graph.save_on_cpu):
            raise CaptureError(
                f"{where()}: the code sets hooks for saved tensors, which a stage would not have: "
                "set them around the step, or in a module that is not cut"
            )
        return enter(self)

    with _replaced(kind, "__enter__", entering):
        yield


@contextmanager
def _python_random(recorder: Recorder) -> Iterator[None]:
    """Random numbers of Python and numpy in opened code would be the same ones in every run."""
    recorder.random_state = _random_state
    yield


def _random_state() -> Any:
    legacy: Any = np.random.get_state()
    kind, keys, *rest = legacy
    return random.getstate(), kind, keys.tobytes(), tuple(rest)
