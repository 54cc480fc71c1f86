# SPDX-License-Identifier: Apache-2.0
"""Plain Python values as tagged JSON, read back without running code that the file names.

None, bool, int, float, str and list are JSON's own.  Other well-known types are objects with one
tag.  What is left is *opaque*: pickled when saved, and when loaded unpickled only if every class
and function that the pickle names is allowed: a checkpoint may come from a shared file system,
and an ordinary unpickle runs whatever its author liked.  `ALWAYS_ALLOWED` holds types whose
construction cannot do harm; callers add their own.

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
from collections.abc import Callable, Iterable
from typing import Any

import torch

from resiliency.errors import CheckpointCorrupt, ConfigError

logger = logging.getLogger(__name__)

#: Give this as `allow` to let a checkpoint that you trust name any class.
ANY_CLASS = "*"

ALWAYS_ALLOWED = frozenset(
    {
        "builtins:bytearray", "builtins:complex", "builtins:frozenset", "builtins:range", "builtins:set",
        "builtins:slice",
        "collections:Counter", "collections:OrderedDict", "collections:defaultdict", "collections:deque",
        "datetime:date", "datetime:datetime", "datetime:time", "datetime:timedelta", "datetime:timezone",
        "decimal:Decimal", "fractions:Fraction", "uuid:UUID", "uuid:SafeUUID",
        "pathlib:Path", "pathlib:PosixPath", "pathlib:PurePosixPath",
        "argparse:Namespace", "types:SimpleNamespace", "_io:BytesIO",
        "torch:Size", "torch:device",
        *(f"torch:{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        "resiliency.checkpoint.values:_numpy_from_parts", "resiliency.checkpoint.values:_tensor_from_bytes",
    }
)  # fmt: skip

_LARGE_HIDDEN_BYTES = 1 << 20


class Allowed:
    """Which classes a checkpoint may name.  `module:qualname`, as `class_name` gives it."""

    def __init__(self, allow: Iterable[type | str] = ()) -> None:
        self._names = ALWAYS_ALLOWED | {item if isinstance(item, str) else class_name(item) for item in allow}

    def resolve(self, name: str) -> Any:
        """The object called `name`.

        Raises:
            ConfigError: it is not allowed, and so was not imported.
            CheckpointCorrupt: there is nothing of that name.
        """
        if name not in self._names and ANY_CLASS not in self._names:
            raise ConfigError(
                f"the checkpoint names {name}, which is not on the list of allowed classes.",
                hint=f"If you trust where it came from, pass allow=[{name!r}].",
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
        numpy = sys.modules.get("numpy")
        if (
            numpy is not None
            and isinstance(value, (numpy.ndarray, numpy.generic))
            and not value.dtype.hasobject
        ):
            return _encode_numpy(value)
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


def _encode_dict(value: Any) -> Any:
    return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}


def _encode_list(value: Any) -> Any:
    return [encode(item) for item in value]


def _is_numpy(value: Any) -> bool:
    """True for numpy's own arrays and scalars, unless they hold Python objects."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (isinstance(value, numpy.generic) or type(value) is numpy.ndarray):
        return False
    return not value.dtype.hasobject


def _encode_numpy(value: Any) -> Any:
    descr = value.dtype.descr if value.dtype.names else value.dtype.str
    kind = "array" if hasattr(value, "ctypes") else "scalar"
    return {"numpy": [kind, descr, list(value.shape), _b64(value.tobytes())]}


def _decode_numpy(body: Any, allowed: Allowed) -> Any:
    import numpy

    kind, descr, shape, data = body
    dtype = numpy.dtype([_field(item) for item in descr] if isinstance(descr, list) else descr)
    if dtype.hasobject:
        raise CheckpointCorrupt("a numpy value of Python objects is not read.")
    array = numpy.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()
    return array[()] if kind == "scalar" else array


def _field(item: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(part) if isinstance(part, list) else part for part in item)


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    dict: _encode_dict,
    list: _encode_list,
    tuple: lambda v: {"tuple": _encode_list(v)},
    bytes: lambda v: {"bytes": _b64(v)},
    complex: lambda v: {"complex": struct.pack("<dd", v.real, v.imag).hex()},
    torch.dtype: lambda v: {"dtype": str(v).removeprefix("torch.")},
    torch.device: lambda v: {"device": str(v)},
    torch.Size: lambda v: {"size": list(v)},
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
        if _is_numpy(obj):
            return _numpy_from_parts, tuple(_encode_numpy(obj)["numpy"])
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


def _numpy_from_parts(*parts: Any) -> Any:
    return _decode_numpy(parts, Allowed())


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


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Allowed) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        return self._allowed.resolve(f"{module}:{name}")


def _unpickled(data: bytes, allowed: Allowed) -> Any:
    try:
        return _Unpickler(data, allowed).load()
    except (pickle.UnpicklingError, EOFError, IndexError) as error:
        raise CheckpointCorrupt(f"an opaque value of the checkpoint cannot be read: {error}.") from error
