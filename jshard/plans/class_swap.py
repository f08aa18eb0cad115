"""Subclasses made at run time, for objects whose class is swapped: an object keeps its identity, and gains behaviour.

Sharding is added to a user's own objects: a module becomes a unit, a variable is stored padded. Its new class has the
name of its own one, so that messages, checkpoints and `repr` name what the user wrote.
"""

import copyreg
import functools
from collections.abc import Callable, Mapping
from typing import Any

Rebuild = tuple[Callable[..., type], tuple[object, ...]]
"""A function at the top of a module, and its arguments, which returns the class again."""


def swapped_class(
    base: type,
    attributes: Mapping[str, object],
    *,
    rebuild: Rebuild,
    mixins: tuple[type, ...] = (),
    **class_settings: object,
) -> type:
    """Returns a subclass that passes for its base, and that pickle can make again.

    Callers cache it: Flax compares the classes of two objects, so equal objects must have one class, or each call of a
    model would compile again.

    Args:
        base: the user's class.
        attributes: what the subclass adds.
        rebuild: how pickle makes the subclass again, also in another process: it is in no module, to be found by name.
        mixins: classes whose methods precede those of the base.
        **class_settings: keywords of the class statement.
    """
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_jshard_rebuild": rebuild,
        **attributes,
    }
    metaclass = _pickling_metaclass(type(base))
    # Called like a class statement: Flax's metaclass and `__init_subclass__` see an ordinary subclass.
    return metaclass(base.__name__, (*mixins, base), body, **class_settings)


@functools.cache
def _pickling_metaclass(metaclass: type) -> type:
    """Returns a subclass of a metaclass, by whose instances pickle calls `_rebuild_of`.

    Pickle looks up how to reduce an object by its exact type, and the type of a class is its metaclass. Flax's own must
    not be registered: then all of its classes would be reduced like this.
    """
    pickling = type("SwappedMeta", (metaclass,), {})
    copyreg.pickle(pickling, _rebuild_of)  # type: ignore[arg-type]
    return pickling


def _rebuild_of(cls: Any) -> Rebuild:
    return cls._jshard_rebuild
