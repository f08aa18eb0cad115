"""What the reference documents: the names of each public module, by the paths under which a user imports them."""

import inspect
import types

import jshard as js
from jshard import errors

MODULES = (js, js.checkpoint, js.data, js.kernels, js.parallel, js.train)

# Names for a format of your own, which `js.checkpoint` itself does not have.
OF_FORMATS = ("ArraySource", "Stored", "stored_array")


def public_names() -> list[str]:
    """Every public name, as `jshard.fully_shard`; each object once."""
    names = [f"jshard.checkpoint.formats.{name}" for name in OF_FORMATS]
    for module in MODULES:
        for name in getattr(module, "__all__", dir(module)):
            is_module = isinstance(getattr(module, name), types.ModuleType)
            if not is_module and not name.startswith("_"):
                names.append(f"{module.__name__}.{name}")
    for name, value in vars(errors).items():
        is_error = inspect.isclass(value) and issubclass(value, Exception)
        if is_error and name not in js.__all__:
            names.append(f"jshard.errors.{name}")
    return names
