"""Values on the wire: plain data and dataclasses as msgpack, arrays as raw bytes, functions by name. No pickle.

Arrays of a value lie end to end in one payload; each leaves its dtype, shape and offset in the msgpack as an
extension. Decoding follows the receiving endpoint's annotation, strictly, and gives arrays of its own.
"""

from __future__ import annotations

import functools
import importlib
import math
import threading
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ContractError

ALIGN_BYTES = 16
_ARRAY = 1  # the one extension code

DType = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
]
_DTYPES = typing.get_args(DType)


class Packed(msgspec.Struct, frozen=True):
    """An encoded value. Equal values have equal bytes, which is how ranks are compared."""

    body: bytes
    payload: bytes


class _ArrayRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: DType
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=16)]
    offset: Annotated[int, msgspec.Meta(ge=0)]


_NAMES: dict[Any, DType] = {np.dtype(name): name for name in _DTYPES}
_reference_encoder = msgspec.msgpack.Encoder()
_reference_decoder = msgspec.msgpack.Decoder(_ArrayRef)
_open = threading.local()  # `payload`: of the value that this thread is decoding


class _FunctionRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function by "module:qualname", and the keyword arguments bound to it."""

    function: str
    kwargs: dict[str, Any]


def pack(value: Any) -> Packed:
    """Encode any value that is made of plain data, dataclasses, arrays and importable functions.

    Raises: ContractError naming what cannot cross.
    """
    chunks: list[bytes] = []
    size = 0

    def hook(item: Any) -> Any:
        nonlocal size
        if isinstance(item, np.ndarray):
            reference, raw = _array_out(item, size)
            chunks.append(raw)
            size += len(raw)
            return reference
        if isinstance(item, np.generic):
            return item.item()
        if callable(item):
            return _function_out(item)
        raise ContractError(f"a {type(item).__qualname__} cannot cross between processes: pass plain data or arrays")

    try:
        body = msgspec.msgpack.encode(value, enc_hook=hook)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ContractError(f"a value cannot cross between processes: {error}") from error
    return Packed(body, b"".join(chunks))


def unpack(packed: Packed, annotation: Any, *, functions: bool = True) -> Any:
    """Decode a value as `annotation`; without `functions` nothing is imported for it.

    Raises: ContractError saying where the value does not fit it.
    """
    _open.payload = packed.payload
    try:
        return _decoder(annotation, functions).decode(packed.body)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ContractError(str(error)) from error


def name_of(item: Callable[..., Any] | type) -> str:
    """ "module:qualname" of a function or class.

    Raises: ContractError when another process could not import it by that name.
    """
    module, qualname = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if module is None or qualname is None or module == "__main__" or "<" in qualname:
        raise ContractError(f"{qualname or item!r} cannot cross between processes: define it at the top of a module")
    return f"{module}:{qualname}"


def resolve(name: str) -> Any:
    """The object that "module:qualname" names.

    Raises: ContractError when there is none.
    """
    module, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ContractError(f"'{name}' cannot be imported here: {error}") from error
    return found


def _array_out(array: NDArray[Any], offset: int) -> tuple[msgspec.msgpack.Ext, bytes]:
    name = _NAMES.get(array.dtype)
    if name is None:
        raise ContractError(f"an array of dtype {array.dtype} cannot cross between processes")
    raw = array.tobytes()
    reference = _reference_encoder.encode(_ArrayRef(name, list(array.shape), offset))
    padding = -len(raw) % ALIGN_BYTES
    return msgspec.msgpack.Ext(_ARRAY, reference), raw + bytes(padding) if padding else raw


@functools.cache
def _decoder(annotation: Any, functions: bool) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(annotation, dec_hook=_custom if functions else _custom_data, ext_hook=_array_in)


def _array_in(code: int, data: memoryview) -> NDArray[Any]:
    if code != _ARRAY:
        raise msgspec.ValidationError(f"unknown extension {code}")
    reference = _reference_decoder.decode(data)
    payload, dtype, count = _open.payload, np.dtype(reference.dtype), math.prod(reference.shape)
    if reference.offset + count * dtype.itemsize > len(payload):
        raise msgspec.ValidationError(f"an array of shape {reference.shape} outside its payload")
    flat = np.frombuffer(payload, dtype, count, reference.offset) if count else np.empty(0, dtype)
    return flat.reshape(reference.shape).copy()


def _function_out(function: Callable[..., Any]) -> _FunctionRef:
    if isinstance(function, functools.partial):
        if function.args:
            raise ContractError(f"bind {function.func.__name__}'s arguments by keyword: positional ones cannot cross")
        return _FunctionRef(name_of(function.func), function.keywords)
    if not isinstance(function, types.FunctionType | type):
        raise ContractError(f"a {type(function).__qualname__} cannot cross between processes: pass a function")
    return _FunctionRef(name_of(function), {})


def _custom(annotation: Any, value: Any) -> Any:
    """Decode what msgspec does not know: array and function annotations."""
    origin = _origin(annotation)
    if origin is np.ndarray:
        return _checked(value, annotation)
    if callable(value) or not _is_callable_type(origin):
        raise msgspec.ValidationError(f"values annotated {annotation} cannot cross between processes")
    reference = msgspec.convert(value, _FunctionRef)
    function = resolve(reference.function)
    return functools.partial(function, **reference.kwargs) if reference.kwargs else function


def _custom_data(annotation: Any, value: Any) -> Any:
    """The same where the sender must not choose what is imported here."""
    if _is_callable_type(typing.get_origin(annotation) or annotation):
        raise msgspec.ValidationError("a worker cannot return a function")
    return _custom(annotation, value)


def _is_callable_type(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Callable)  # type: ignore[arg-type]


def _checked(value: Any, annotation: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise msgspec.ValidationError(f"Expected `array`, got `{type(value).__name__}`")
    for scalar in _scalars(annotation):
        if not issubclass(value.dtype.type, scalar):
            raise msgspec.ValidationError(f"Expected an array of {scalar.__name__}, got {value.dtype}")
    return value


@functools.cache
def _scalars(annotation: Any) -> list[type[np.generic]]:
    """The scalar types that an array annotation asks for."""
    found = [scalar for dtype in typing.get_args(annotation)[1:] for scalar in typing.get_args(dtype)]
    return [scalar for scalar in found if isinstance(scalar, type) and issubclass(scalar, np.generic)]


@functools.cache
def _origin(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation
