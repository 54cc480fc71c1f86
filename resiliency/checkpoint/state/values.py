# SPDX-License-Identifier: Apache-2.0
"""Plain Python values as tagged JSON, read back without running code that the file names.

None, bool, int, float, str and list are JSON's own.  Other well-known types are objects with one
tag.  What is left is *opaque*: pickled when saved, and when loaded unpickled only if every class
and function that the pickle names is allowed: a checkpoint may come from a shared file system,
and an ordinary unpickle runs whatever its author liked.  `ALWAYS_ALLOWED` holds types whose
construction cannot do harm; callers add their own.

Enums, dataclasses and named tuples are saved by class and content.  They are built without a call
of their constructor, of classes that are allowed or that the state to restore holds itself: such a
class is taken from there, and nothing is imported.

Equal values that were one object come back as several; cycles are refused.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import io
import json
import logging
import math
import pickle
import struct
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from resiliency.errors import CheckpointCorrupt, CheckpointError, ConfigError

logger = logging.getLogger(__name__)

#: Give this as `allow` to let a checkpoint that you trust name any class.
ANY_CLASS = "*"

ALWAYS_ALLOWED = frozenset(
    {
        "builtins:bool", "builtins:bytearray", "builtins:bytes", "builtins:complex", "builtins:dict",
        "builtins:float", "builtins:frozenset", "builtins:int", "builtins:list", "builtins:range",
        "builtins:set", "builtins:slice", "builtins:str", "builtins:tuple",
        "collections:Counter", "collections:OrderedDict", "collections:defaultdict", "collections:deque",
        "datetime:date", "datetime:datetime", "datetime:time", "datetime:timedelta", "datetime:timezone",
        "decimal:Decimal", "fractions:Fraction", "uuid:UUID", "uuid:SafeUUID",
        "pathlib:Path", "pathlib:PosixPath", "pathlib:PurePosixPath",
        "argparse:Namespace", "random:Random", "types:SimpleNamespace", "_io:BytesIO",
        "numpy.random._pickle:__bit_generator_ctor", "numpy.random._pickle:__generator_ctor",
        "numpy.random._pickle:__randomstate_ctor",
        "numpy.random._mt19937:MT19937", "numpy.random._pcg64:PCG64", "numpy.random._pcg64:PCG64DXSM",
        "numpy.random._philox:Philox", "numpy.random._sfc64:SFC64",
        "numpy.random.bit_generator:SeedSequence", "numpy.random.bit_generator:__pyx_unpickle_SeedSequence",
        "torch:Size", "torch:device",
        *(f"torch:{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        *(f"resiliency.checkpoint.state.values:{name}" for name in
          ("_generator_from_parts", "_numpy_from_text", "_objects_from_parts",
           "_tensor_from_bytes")),
    }
)  # fmt: skip

_LARGE_HIDDEN_BYTES = 1 << 20


class Allowed:
    """Which classes a checkpoint may name.  `module:qualname`, as `class_name` gives it."""

    def __init__(self, allow: Iterable[type | str] = ()) -> None:
        self._names = ALWAYS_ALLOWED | {item if isinstance(item, str) else class_name(item) for item in allow}
        self._trusted: dict[str, type] = {}

    def permits(self, name: str) -> bool:
        """Whether `resolve` would look for `name`."""
        return name in self._names or ANY_CLASS in self._names

    def trust(self, obj: Any) -> None:
        """Take the enums, dataclasses and named tuples that `obj`, a part of the state to restore, holds."""
        self._trusted.update((class_name(cls), cls) for cls in _content_classes(obj))

    def content_class(self, name: str) -> Any:
        """The enum, dataclass or named tuple called `name`.  Raises as `resolve`."""
        return self._trusted.get(name) or self.resolve(name)

    def resolve(self, name: str) -> Any:
        """The object called `name`.

        Raises:
            ConfigError: it is not allowed, and so was not imported.
            CheckpointCorrupt: there is nothing of that name.
        """
        if not self.permits(name):
            raise ConfigError(
                f"the checkpoint names {name}, which is not on the list of allowed classes.",
                hint=f"If you trust where it came from, allow it: CheckpointerOptions(allow=[{name!r}]).",
                name=name,
            )
        module, _, qualname = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in qualname.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise CheckpointCorrupt(f"the checkpoint names {name}, which cannot be imported.") from error
        return found


def class_name(cls: type) -> str:
    """``module:qualname``, the way classes are named in layouts and allow-lists."""
    return f"{cls.__module__}:{cls.__qualname__}"


def encode(value: Any) -> Any:
    """`value` as something that `json.dumps` takes.

    Raises:
        ConfigError: it cannot be saved (a lock, an open file, a cycle, ...); the text names the type.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        # Beyond this Python refuses to convert from decimal text.
        return value if abs(value) < 1 << 512 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"f": struct.pack("<d", value).hex()}
    encoder = _ENCODERS.get(kind)
    try:
        if encoder is not None:
            return encoder(value)
        if (content := _content(value)) is not None:
            return {content[0]: [class_name(kind), content[1]]}
        if (encoded := _encode_numpy(value)) is not None:
            return encoded
    except RecursionError:
        raise ConfigError("the state contains itself, or is nested too deeply to be saved.") from None
    return {"pickle": _b64(_pickled(value))}


def decode(value: Any, allowed: Allowed) -> Any:
    """Inverse of `encode`, after JSON.

    Raises:
        ConfigError: a class that it names is not allowed.
        CheckpointCorrupt: not something that `encode` makes.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [decode(item, allowed) for item in value]
    try:
        ((tag, body),) = value.items()
        return _DECODERS[tag](body, allowed)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointCorrupt(f"a plain value of the checkpoint cannot be read: {error!r}.") from error


class Put:
    """Puts values in the place of parts of a state, as the objects that others may hold a reference to.

    Generators, dataclasses (not frozen ones), tensors, arrays and the standard library's containers that are
    at the same place take over the content.  What was one object when it was saved is one again, and one that
    is at two places takes over the first: they may have been two.  One for a whole restore.
    """

    def __init__(self) -> None:
        # With the objects themselves: the number of one that is gone may be another's.
        self._used: dict[int, Any] = {}
        self._done: dict[int, tuple[Any, Any]] = {}

    def put(self, target: Any, value: Any, *, containers: bool = True) -> Any:
        """`value`, as `target` where that can be.

        Args:
            containers: False: lists, dicts and the like are made anew, for an object that takes its state
                whole and may compare it with what it has.
        """
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return _put_tensor(target, value) if containers else value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if type(target) is not kind:
            return value
        if kind is tuple or (kind is list and not containers):
            items = []
            for i, item in enumerate(value):
                items.append(self.put(target[i] if i < len(target) else None, item, containers=containers))
            return kind(items)
        if kind is dict and not containers:
            made = {}
            for key, item in value.items():
                made[key] = self.put(target.get(key), item, containers=False)
            return made
        if id(target) in self._used or not _takes_over(target, value, containers):
            return value
        self._used[id(target)] = target
        self._done[id(value)] = value, target  # before its items, of which it may be one
        # One frame of Python for each level: what was decoded is not too deep for this.
        if kind in _DICTS:
            olds = dict(target)
            target.clear()
            for key, item in value.items():  # a Counter's `update` adds
                target[key] = self.put(olds.get(key), item)
            if kind is defaultdict:
                target.default_factory = value.default_factory
        elif kind is list or kind is deque:
            old = list(target)
            target.clear()
            for i, item in enumerate(value):
                target.append(self.put(old[i] if i < len(old) else None, item))
        elif kind is set:
            target.clear()
            target.update(value)
        elif kind is Namespace or kind is SimpleNamespace:
            olds = dict(vars(target))
            vars(target).clear()
            for name, item in vars(value).items():
                vars(target)[name] = self.put(olds.get(name), item)
        elif kind is torch.Generator:
            target.set_state(value.get_state())
        elif is_array(value):
            target[...] = value
        else:  # a dataclass
            for name in _names_set(value):
                item = self.put(getattr(target, name, None), getattr(value, name), containers=containers)
                object.__setattr__(target, name, item)
        return target


_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_DICTS = (dict, OrderedDict, defaultdict, Counter)


def _takes_over(target: Any, value: Any, containers: bool) -> bool:
    """Whether `target`, of the same class, can have the content of `value`."""
    kind = type(value)
    if kind is torch.Generator:
        return bool(target.device.type == value.device.type)
    if _is_record(kind):
        return not kind.__dataclass_params__.frozen
    if not containers:
        return False
    if kind is deque:
        return bool(target.maxlen == value.maxlen)
    if is_array(value):
        return bool(target.flags.writeable) and (target.shape, target.dtype) == (value.shape, value.dtype)
    return kind in (*_DICTS, list, set, Namespace, SimpleNamespace)


def _put_tensor(target: Any, value: torch.Tensor) -> Any:
    """One that was hidden in an object: a parameter of the program stays one."""
    if not isinstance(target, torch.Tensor) or target.layout is not torch.strided:
        return value
    if (target.shape, target.dtype) != (value.shape, value.dtype):
        return value
    target.detach().copy_(value)
    return target


def opaque_parts(
    encoded: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The pickles in what `encode` made, with their places."""
    if isinstance(encoded, list):
        for position, item in enumerate(encoded):
            yield from opaque_parts(item, (*path, position))
    elif isinstance(encoded, dict):
        ((tag, body),) = encoded.items()
        if tag == "pickle":
            yield path, body
        elif tag == "dict":
            for key, item in body:
                yield from opaque_parts(key, path)
                yield from opaque_parts(item, (*path, key if isinstance(key, str | int) else str(key)))
        elif tag == "record":
            for name, item in body[1]:
                yield from opaque_parts(item, (*path, name))
        elif tag in ("tuple", "named"):
            yield from opaque_parts(body if tag == "tuple" else body[1], path)


def names_in(opaque: str) -> set[str]:
    """The classes and functions that an opaque value names; none of them is imported or run."""
    dry = _DryUnpickler(io.BytesIO(base64.b64decode(opaque)))
    dry.load()
    return dry.names


def dump_values(values: list[Any]) -> bytes:
    """The blob that travels with a capture: what `encode` made of each value, in order."""
    return json.dumps(values, separators=(",", ":")).encode()


def load_values(blob: bytes) -> list[Any]:
    """Inverse of `dump_values`; each item still has to be decoded."""
    try:
        values = json.loads(blob)
    except ValueError as error:
        raise CheckpointCorrupt(f"the plain values of the checkpoint are damaged: {error}.") from error
    if not isinstance(values, list):
        raise CheckpointCorrupt("the plain values of the checkpoint are no list.")
    return values


def _content_classes(obj: Any) -> Iterator[type]:
    cls = type(obj)
    if isinstance(obj, Enum):
        yield cls
    elif isinstance(obj, dict):
        for pair in obj.items():
            yield from _content_classes(pair)
    elif isinstance(obj, list | tuple):
        if _is_named_tuple(cls):
            yield cls
        for item in obj:
            yield from _content_classes(item)
    elif _is_record(cls):
        yield cls
        for name in _names_set(obj):
            yield from _content_classes(getattr(obj, name))


def _content(value: Any) -> tuple[str, Any] | None:
    """Tag and content of a value that can be built again from its class and that; None: it cannot."""
    cls = type(value)
    if isinstance(value, Enum):
        return ("enum", value.name) if cls.__members__.get(value.name) is value else None
    if _is_named_tuple(cls):
        return "named", _encode_list(value)
    if _is_record(cls):
        names = _names_set(value)
        if set(getattr(value, "__dict__", ())) <= set(names):
            return "record", [[name, encode(getattr(value, name))] for name in names]
    return None


def _is_named_tuple(cls: type) -> bool:
    return (
        issubclass(cls, tuple)
        and hasattr(cls, "_fields")
        and hasattr(cls, "_make")
        and not cls.__dictoffset__
    )


def _is_record(cls: type) -> bool:
    """A dataclass that is nothing but its fields, and does not say itself how it is pickled."""
    return (
        is_dataclass(cls)
        and cls.__new__ is object.__new__
        and cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__reduce__ is object.__reduce__
        # Those of a frozen dataclass with slots are the standard library's.
        and all(
            getattr(getattr(cls, name, None), "__module__", None) in (None, "dataclasses")
            for name in ("__getstate__", "__setstate__")
        )
    )


def _names_set(record: Any) -> list[str]:
    return [f.name for f in fields(record) if hasattr(record, f.name)]


def _decode_enum(body: Any, allowed: Allowed) -> Any:
    name, member = body
    return allowed.content_class(name).__members__[member]


def _decode_named(body: Any, allowed: Allowed) -> Any:
    name, items = body
    cls = allowed.content_class(name)
    if not _is_named_tuple(cls) or len(cls._fields) != len(items):
        raise CheckpointCorrupt(f"{name} is no named tuple of {len(items)} fields here.")
    return tuple.__new__(cls, decode(items, allowed))


def _decode_record(body: Any, allowed: Allowed) -> Any:
    name, items = body
    cls = allowed.content_class(name)
    known = {f.name for f in fields(cls)} if _is_record(cls) else set()
    unknown = sorted({key for key, _ in items} - known)
    if unknown:
        raise CheckpointCorrupt(f"{name} is no dataclass here with a field {', '.join(unknown)}.")
    result = object.__new__(cls)  # not cls(...): __post_init__ ran when the original was made
    for key, item in items:
        object.__setattr__(result, key, decode(item, allowed))
    return result


def _encode_generator(value: Any) -> Any:
    state = value.get_state().numpy().tobytes()
    return {"generator": [value.device.type, _b64(state)]}


def _generator_from_parts(device: str, state: str) -> torch.Generator:
    data = torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
    try:
        generator = torch.Generator(device)
        generator.set_state(data)
    except RuntimeError as error:
        raise CheckpointError(f"a generator of device {device} cannot be made here: {error}.") from error
    return generator


def _encode_dict(value: Any) -> Any:
    return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}


def _encode_list(value: Any) -> Any:
    return [encode(item) for item in value]


def is_array(value: Any) -> bool:
    """True for arrays of numpy's own class: the others have more than elements."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


#: Of dtypes that are not numpy's own, those that arrays are made of again; their classes can do no harm.
_ML_DTYPES = frozenset(
    {
        *("bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"),
        *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "int1", "int2", "int4", "uint1", "uint2", "uint4"),
    }
)


@lru_cache(maxsize=256)
def _description(dtype: Any, cls: type) -> Any:
    """JSON from which `_dtype_described` makes an equal dtype, whose scalars are of `cls`; None: none does.

    Never a pickle of it: a dtype takes whatever flags a pickle gives it, and then bytes for objects.
    """
    if dtype.hasobject:
        return None
    if dtype.names:
        parts = [(*dtype.fields[name][:2], name) for name in dtype.names]
        formats = [_description(part.base, part.base.type) for part, _, _ in parts]
        if None in formats:
            return None
        described: Any = {
            "names": list(dtype.names),
            "formats": formats,
            "shapes": [list(part.shape) for part, _, _ in parts],
            "offsets": [offset for _, offset, _ in parts],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    else:
        described = f"ml_dtypes:{cls.__name__}" if cls.__module__ == "ml_dtypes" else dtype.str
    try:
        found = _dtype_described(described)
    except (ValueError, TypeError, ImportError):
        return None
    return described if found == dtype and found.type is cls else None


def _dtype_described(described: Any) -> Any:
    import numpy

    if isinstance(described, dict):
        formats = [
            (_dtype_described(one), tuple(shape))
            for one, shape in zip(described["formats"], described["shapes"], strict=True)
        ]
        fields: Any = {name: described[name] for name in ("names", "offsets", "itemsize")}
        return numpy.dtype(fields | {"formats": formats}, align=bool(described["aligned"]))
    library, _, name = described.rpartition(":")
    if library:
        if library != "ml_dtypes" or name not in _ML_DTYPES:
            raise ValueError(f"no dtype {described[:80]!r} is known")
        return numpy.dtype(getattr(importlib.import_module(library), name))
    return numpy.dtype(described)


def _encode_numpy(value: Any) -> Any:
    """An array or scalar of numpy's own classes; None: it is something else, or holds Python objects."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    kind, dtype = type(value), value.dtype
    if kind is numpy.ma.MaskedArray:
        data, mask = _encode_numpy(value.data), numpy.ma.getmask(value)
        if data is None:
            return None
        hidden = None if mask is numpy.ma.nomask else encode(mask)
        fill = None if value._fill_value is None else encode(value.fill_value)
        return {"masked": [data, hidden, fill, bool(value.hardmask)]}
    if kind is numpy.recarray or kind is numpy.matrix:
        plain = numpy.asarray(value)
        if dtype.names:
            plain = plain.view(numpy.dtype((numpy.void, dtype)))
        encoded = _encode_numpy(plain)
        return None if encoded is None else {"view": [kind.__name__, encoded]}
    if kind is not numpy.ndarray and kind is not dtype.type:
        return None
    described = _description(dtype, dtype.type)
    if described is None:
        return None
    form = "array" if kind is numpy.ndarray else "scalar"
    return {"numpy": [form, described, list(value.shape), _b64(value.tobytes())]}


def _decode_numpy(body: Any, allowed: Allowed) -> Any:
    import numpy

    form, described, shape, data = body
    dtype = _dtype_described(described)
    if dtype.hasobject:
        raise CheckpointCorrupt("a numpy value of Python objects is not read.")
    if dtype.itemsize:
        array = numpy.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()
    else:  # empty texts
        array = numpy.zeros(shape, dtype)
    return array[()] if form == "scalar" else array


def _decode_masked(body: Any, allowed: Allowed) -> Any:
    import numpy

    data, mask, fill, hard = body
    data, mask, fill = (decode(part, allowed) for part in (data, mask, fill))
    if not is_array(data) or not (mask is None or is_array(mask)):
        raise CheckpointCorrupt("a masked array of the checkpoint has no array in it.")
    if mask is not None and mask.shape != data.shape:
        raise CheckpointCorrupt("a masked array of the checkpoint has a mask of another shape.")
    hidden: Any = numpy.ma.nomask if mask is None else mask
    masked_array: Any = numpy.ma.MaskedArray
    return masked_array(data, mask=hidden, fill_value=fill, hard_mask=bool(hard))


def _decode_view(body: Any, allowed: Allowed) -> Any:
    import numpy

    name, encoded = body
    plain = decode(encoded, allowed)
    if not is_array(plain) or name not in ("matrix", "recarray"):
        raise CheckpointCorrupt("a matrix or record array of the checkpoint cannot be read.")
    return plain.view(getattr(numpy, name))


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    dict: _encode_dict,
    list: _encode_list,
    tuple: lambda v: {"tuple": _encode_list(v)},
    bytes: lambda v: {"bytes": _b64(v)},
    complex: lambda v: {"complex": struct.pack("<dd", v.real, v.imag).hex()},
    torch.dtype: lambda v: {"dtype": str(v).removeprefix("torch.")},
    torch.device: lambda v: {"device": str(v)},
    torch.Size: lambda v: {"size": list(v)},
    torch.Generator: _encode_generator,
}

_DECODERS: dict[str, Callable[[Any, Allowed], Any]] = {
    "int": lambda b, a: int(b, 16),
    "f": lambda b, a: struct.unpack("<d", bytes.fromhex(b))[0],
    "dict": lambda b, a: {decode(k, a): decode(v, a) for k, v in b},
    "tuple": lambda b, a: tuple(decode(item, a) for item in b),
    "bytes": lambda b, a: base64.b64decode(b),
    "complex": lambda b, a: complex(*struct.unpack("<dd", bytes.fromhex(b))),
    "dtype": lambda b, a: dtype_called(b),
    "device": lambda b, a: torch.device(b),
    "size": lambda b, a: torch.Size(b),
    "numpy": _decode_numpy,
    "masked": _decode_masked,
    "view": _decode_view,
    "enum": _decode_enum,
    "named": _decode_named,
    "record": _decode_record,
    "generator": lambda b, a: _generator_from_parts(*b),
    "pickle": lambda b, a: _unpickled(base64.b64decode(b), a),
}


def dtype_called(name: str) -> torch.dtype:
    """torch's dtype of this name, such as ``bfloat16``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorrupt(f"this torch has no dtype {name!r}.", dtype=name)
    return dtype


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class _Pickler(pickle.Pickler):
    """Pickles tensors and arrays in opaque objects as their bytes; their own way names many functions."""

    def reducer_override(self, obj: Any) -> Any:
        if (encoded := _encode_numpy(obj)) is not None:
            return _numpy_from_text, (json.dumps(encoded),)
        if is_array(obj) and obj.dtype == object:
            return _objects_from_parts, (obj.shape, list(obj.flat))
        if type(obj) is torch.Generator:
            return _generator_from_parts, tuple(_encode_generator(obj)["generator"])
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.nbytes > _LARGE_HIDDEN_BYTES:
            logger.warning(
                "a tensor of %d bytes is hidden in an object that cannot be taken apart; it is copied"
                " slowly, while training waits.  Put it in the state directly.",
                plain.nbytes,
            )
        data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
        return _tensor_from_bytes, (str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data)


def _numpy_from_text(text: str) -> Any:
    return decode(json.loads(text), Allowed())


def _objects_from_parts(shape: tuple[int, ...], items: list[Any]) -> Any:
    import numpy

    array = numpy.empty(len(items), dtype=object)
    for position, item in enumerate(items):  # at once, numpy would look into lists
        array[position] = item
    return array.reshape(shape)


def _tensor_from_bytes(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype_called(dtype)).reshape(shape)


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=4).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"a value of type {class_name(type(value))} in the state cannot be saved: {error}.",
            hint="Leave it out of the state, or give its class a state_dict and load_state_dict.",
        ) from error
    return buffer.getvalue()


class _Unpickler(pickle.Unpickler):  # noqa: S301 - it refuses types that were not allowed
    def __init__(self, data: bytes, allowed: Allowed) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        return self._allowed.resolve(f"{module}:{name}")


class _Anything:
    """Stands for whatever a pickle builds, in a run that only asks for names."""

    def __new__(cls, *args: object, **kwargs: object) -> _Anything:
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __call__(self, *args: object, **kwargs: object) -> _Anything:
        return self

    def _take(self, *args: object) -> None: ...

    __setstate__ = __setitem__ = append = extend = add = _take


class _DryUnpickler(pickle.Unpickler):  # noqa: S301 - it makes no object
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.names.add(f"{module}:{name}")
        return _Anything


def _unpickled(data: bytes, allowed: Allowed) -> Any:
    try:
        return _Unpickler(data, allowed).load()
    except (pickle.UnpicklingError, EOFError, IndexError) as error:
        raise CheckpointCorrupt(f"an opaque value of the checkpoint cannot be read: {error}.") from error
