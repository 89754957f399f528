"""Codec of values: plain data and dataclasses as msgpack, arrays as raw bytes, functions by name.

There is no pickle. The arrays of a value lie end to end in one payload. Each leaves its dtype,
shape and offset in the msgpack body, as an extension. A class may define `to_columns`, so that a
list of it travels as a few long arrays. Decoding follows the annotation of the receiving endpoint
strictly. Decoded arrays share one private buffer.
"""

from __future__ import annotations

import functools
import threading
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.controller.channel.decode_cache import Build, builder_for, store
from spmd_rl.controller.channel.import_names import FunctionRef, reference_to, resolve_reference
from spmd_rl.errors import ContractError

MAX_BODY_BYTES = 256 << 20
MAX_PAYLOAD_BYTES = 8 << 30
ALIGN_BYTES = 16
_ARRAY_CODE = 1  # the only msgpack extension in use

DType = Literal[
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
_DTYPES = typing.get_args(DType)


Packed = tuple[bytes, bytes]  # body and payload of an encoded value; equal values have equal bytes
NOTHING: Packed = (b"", b"")  # the value of a message that needs none


class _ArrayRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: DType
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=16)]
    offset: Annotated[int, msgspec.Meta(ge=0, multiple_of=ALIGN_BYTES)]


_NAME_OF_DTYPE: dict[Any, DType] = {np.dtype(name): name for name in _DTYPES}
_DTYPE_OF_NAME = {name: dtype for dtype, name in _NAME_OF_DTYPE.items()}
_encode_array_ref = msgspec.msgpack.Encoder().encode
_decode_array_ref = msgspec.msgpack.Decoder(_ArrayRef).decode
_array = np.ndarray
# `_EMPTY + payload` makes a bytearray in half the time of its constructor
_EMPTY = bytearray()
# The value that this thread is decoding: the `buffer` of its arrays, and their `layouts` by id.
_decoding = threading.local()


class Codec:
    """Encodes and decodes the values of one annotation.

    `pack` encodes a value, as the function of that name does. Without `functions`, decoding imports
    nothing. Without `repeats`, it does not look for a value like one of those before.
    """

    def __init__(self, annotation: Any, *, functions: bool = True, repeats: bool = True) -> None:
        columns = _columns(annotation)
        self.pack: Callable[[Any], Packed] = (
            functools.partial(_pack_columns, columns.row_type) if columns else pack
        )
        self._finish = columns.column_type.rows if columns else None
        self._builders: dict[bytes, Build | None] = {}
        self._repeats = repeats
        self._decode = msgspec.msgpack.Decoder(
            columns.column_type if columns else annotation,
            dec_hook=functools.partial(_decode_custom, functions),
            ext_hook=_decode_array,
        ).decode

    def unpack(self, packed: Packed) -> Any:
        """Decode a value.

        Raises: ContractError saying where the value does not fit the annotation.
        """
        body, payload = packed
        buffer = _EMPTY + payload  # a private copy, which all arrays share
        try:
            if build := self._builders.get(body):
                return build(buffer)
            _decoding.buffer, _decoding.layouts = buffer, {}
            value = self._decode(body)
            if self._finish is not None:
                value = self._finish(value)
            if self._repeats and body not in self._builders:
                store(self._builders, body, builder_for(value, _decoding.layouts))
            return value
        except (
            msgspec.MsgspecError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ContractError(str(error)) from error


def pack(value: Any) -> Packed:
    """Encode a value that is made of plain data, dataclasses, arrays and importable functions.

    Raises: ContractError naming what cannot cross, or when the other side would refuse the value as
    too large.
    """
    try:
        packer = _idle_packers.pop()
    except IndexError:  # other threads are using all of them
        packer = _Packer()
    try:
        body = packer.encode(value)
        if len(body) > MAX_BODY_BYTES or packer.size > MAX_PAYLOAD_BYTES:
            raise ContractError(
                f"a value of {len(body)} + {packer.size} bytes exceeds the wire's limits of "
                f"{MAX_BODY_BYTES} (plain data) and {MAX_PAYLOAD_BYTES} (arrays): "
                "pass less at once"
            )
        return body, b"".join(packer.chunks)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ContractError(f"a value cannot cross between processes: {error}") from error
    finally:
        packer.chunks.clear()
        packer.size = 0
        _idle_packers.append(packer)


class _Packer:
    """Encodes one value at a time. It is reused, since making one takes as long as using it."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.size = 0
        self.encode = msgspec.msgpack.Encoder(enc_hook=self._reference).encode

    def _reference(self, item: Any) -> Any:
        """Return what represents `item` in the body; the bytes of an array go to the payload."""
        if type(item) is not _array:  # a subclass, such as a masked array, is more than its bytes
            return _scalar_or_function(item)
        raw, offset = item.tobytes(), self.size
        size = len(raw)
        if size % ALIGN_BYTES:
            raw += bytes(-size % ALIGN_BYTES)
            size = len(raw)
        self.chunks.append(raw)
        self.size = offset + size
        return _array_reference(item.dtype, item.shape, offset)


_idle_packers: list[_Packer] = []


def _pack_columns(row_type: Any, value: Any) -> Packed:
    """Encode a list of `row_type` by columns, and any other value as it is."""
    if isinstance(value, list) and all(isinstance(item, row_type) for item in value):
        value = row_type.to_columns(value)
    return pack(value)


@functools.lru_cache(1024)
def _array_reference(
    dtype: np.dtype[Any], shape: tuple[int, ...], offset: int
) -> msgspec.msgpack.Ext:
    """Return what represents an array in a body."""
    name = _NAME_OF_DTYPE.get(dtype)
    if name is None:
        raise ContractError(f"an array of dtype {dtype} cannot cross between processes")
    return msgspec.msgpack.Ext(_ARRAY_CODE, _encode_array_ref((name, shape, offset)))


class _ColumnTypes(NamedTuple):
    """A list of `row_type` travels as one `column_type`.

    `row_type.to_columns(list)` makes it, and `column_type.rows()` makes the list again.
    """

    row_type: Any
    column_type: Any


def _columns(annotation: Any) -> _ColumnTypes | None:
    """Return how an annotation travels by columns, if it is a list of a class that can."""
    if typing.get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    if typing.get_origin(annotation) is not list:
        return None
    row_type: Any = typing.get_args(annotation)[0]
    if not hasattr(row_type, "to_columns"):
        return None
    return _ColumnTypes(row_type, typing.get_type_hints(row_type.to_columns)["return"])


def _decode_array(code: int, data: memoryview) -> NDArray[Any]:
    if code != _ARRAY_CODE:
        raise msgspec.ValidationError(f"unknown extension {code}")
    reference = _decode_array_ref(data)
    dtype, shape = _DTYPE_OF_NAME[reference.dtype], tuple(reference.shape)
    array = _array(shape, dtype, _decoding.buffer, reference.offset)
    _decoding.layouts[id(array)] = shape, dtype, reference.offset
    return array


def _scalar_or_function(item: Any) -> Any:
    if isinstance(item, np.generic):
        return item.item()
    if isinstance(item, _array):
        raise ContractError(
            f"a {type(item).__qualname__} cannot cross between processes: "
            "pass a plain numpy.ndarray"
        )
    if callable(item):
        return reference_to(item)
    raise ContractError(
        f"a {type(item).__qualname__} cannot cross between processes: pass plain data or arrays"
    )


def _decode_custom(functions: bool, annotation: Any, value: Any) -> Any:
    """Decode what msgspec does not know: arrays, and functions where the sender may name one."""
    kind = _kind(annotation)
    if kind.scalars is not None:
        if not isinstance(value, np.ndarray):
            raise msgspec.ValidationError(f"Expected `array`, got `{type(value).__name__}`")
        if kind.scalars and not issubclass(value.dtype.type, kind.scalars):
            raise msgspec.ValidationError(
                f"Expected an array of {kind.scalars[0].__name__}, got {value.dtype}"
            )
        return value
    if kind.is_function and not functions:
        raise msgspec.ValidationError("a worker cannot return a function")
    if callable(value) or not kind.is_function:
        raise msgspec.ValidationError(
            f"values annotated {annotation} cannot cross between processes"
        )
    return resolve_reference(msgspec.convert(value, FunctionRef))


class _AnnotationKind(NamedTuple):
    """An annotation that msgspec does not know: an array or a function.

    `scalars` are the scalar types that the array may have, empty for any; None for no array.
    """

    scalars: tuple[type[np.generic], ...] | None
    is_function: bool


@functools.cache
def _kind(annotation: Any) -> _AnnotationKind:
    origin = typing.get_origin(annotation) or annotation
    if origin is np.ndarray:
        scalars: list[type[np.generic]] = []
        for dtype in typing.get_args(annotation)[1:]:
            for scalar in typing.get_args(dtype):
                if isinstance(scalar, type) and issubclass(scalar, np.generic):
                    scalars.append(scalar)
        return _AnnotationKind(tuple(scalars), False)
    is_function = isinstance(origin, type) and issubclass(origin, Callable)  # type: ignore[arg-type]
    return _AnnotationKind(None, is_function)
