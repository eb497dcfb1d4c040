"""The names of a model's modules, parameters and buffers, found by identity."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stageline.capturing.naming import named_everywhere
from stageline.capturing.streams.tracking import numbers_of
from stageline.torch_private import storage_of


class ModelNames:
    """Knows what the model calls everything in it.

    Attributes:
        model: The user's model.
        modules: Every registered module by name, aliases included.
        extra: Modules that are called but not registered (held in a plain list), by a made-up name.
        numbers: What random streams call the modules, by identity.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.extra: dict[str, nn.Module] = {}
        self._paths: dict[int, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look again: tensors may have been replaced, by ``.to(...)`` or by real ones for meta."""
        model = self.model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.numbers = numbers_of(model)
        self._paths = {id(module): path for path, module in self.extra.items()}
        for path, module in self.modules.items():
            self._paths.setdefault(id(module), path)
        self._storages = {
            storage_of(parameter): name
            for name, parameter in model.named_parameters()
            if not is_lazy(parameter)
        }
        self.order = {name: index for index, name in enumerate(_all_names(model))}
        self._tensors: dict[int, list[str]] = {}
        for path, module in self.modules.items():
            if self._paths[id(module)] != path:
                continue
            prefix = f"{path}." if path else ""
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._tensors.setdefault(id(tensor), []).append(prefix + name)

    def path_of(self, module: nn.Module) -> str:
        """Return the first name of a module; one that nobody registered is searched for."""
        path = self._paths.get(id(module))
        if path is None:
            path = self._found(module)
            while path in self.modules or path in self.extra:
                path += "_"
            self._paths[id(module)] = path
            self.extra[path] = module
        return path

    def registers(self, module: nn.Module) -> bool:
        """Whether a module is one of the model's own, by registration."""
        path = self._paths.get(id(module))
        return path is not None and self.modules.get(path) is module

    def module(self, path: str) -> nn.Module:
        return self.modules[path] if path in self.modules else self.extra[path]

    def tensor_names(self, tensor: Tensor) -> list[str]:
        """Return the names of a parameter or buffer; none for any other tensor."""
        return self._tensors.get(id(tensor), [])

    def parameter_in(self, storage: int) -> str | None:
        """Return the parameter that lies in some memory, if there is one."""
        return self._storages.get(storage)

    def _found(self, module: nn.Module) -> str:
        for path, found in named_everywhere(self.model).items():
            if found is module:
                return path
        return f"unregistered_{type(module).__name__}"


def _all_names(model: nn.Module) -> list[str]:
    """Return the names of all modules and tensors: what a module holds before its children."""
    names = []
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        names.append(path)
        names += [prefix + name for name in (*module._parameters.keys(), *module._buffers.keys())]
    return names
