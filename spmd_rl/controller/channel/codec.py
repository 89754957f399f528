"""Codec of values: plain data and dataclasses as msgpack, arrays as raw bytes, functions by name.

There is no pickle. The arrays of a value lie end to end in one payload. Each leaves its dtype,
shape and offset in the msgpack body, as an extension. A class may define `to_columns`, so that a
list of it travels as a few long arrays. Decoding follows the annotation of the receiving endpoint
strictly. Decoded arrays share one private buffer.

Between processes of one host a large payload is a file of shared memory (shared_arrays.py). The
body then begins with a byte that msgpack never uses, and the payload is the file's name. An array
that lies in such a file already is an extension with that file's name.
"""

from __future__ import annotations

import functools
import threading
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.controller.channel.decode_cache import Build, builder_for, store
from spmd_rl.controller.channel.import_names import FunctionRef, reference_to, resolve_reference
from spmd_rl.controller.channel.shared_arrays import (
    SHARED_BYTES,
    Outgoing,
    SharedArrays,
    SharedFile,
    SharedPlace,
)
from spmd_rl.errors import ContractError

MAX_BODY_BYTES = 256 << 20
MAX_PAYLOAD_BYTES = 8 << 30
ALIGN_BYTES = 16
_ARRAY_CODE, _NAMED_ARRAY_CODE = 1, 2  # the only msgpack extensions in use
_IS_SHARED = b"\xc1"  # the first byte of a body whose payload is the name of a file

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


class _NamedArrayRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    file: str
    array: _ArrayRef


_NAME_OF_DTYPE: dict[Any, DType] = {np.dtype(name): name for name in _DTYPES}
_DTYPE_OF_NAME = {name: dtype for dtype, name in _NAME_OF_DTYPE.items()}
_encode_array_ref = msgspec.msgpack.Encoder().encode
_decode_array_ref = msgspec.msgpack.Decoder(_ArrayRef).decode
_decode_named_ref = msgspec.msgpack.Decoder(_NamedArrayRef).decode
_PADDING = bytes(ALIGN_BYTES)
_COPY_BYTES = 1 << 12  # an array of less is copied, which takes less time than a view of it
_array = np.ndarray
# `_EMPTY + payload` makes a bytearray in half the time of its constructor
_EMPTY = bytearray()
# The value that this thread is decoding: the `buffer` of its arrays, their `layouts` by id, and how
# to `map` a file that it names.
_decoding = threading.local()


class Codec:
    """Encodes and decodes the values of one annotation.

    `pack` encodes a value, as the function of that name does. Without `functions`, decoding imports
    nothing. Without `repeats`, it does not look for a value like one of those before.
    """

    def __init__(self, annotation: Any, *, functions: bool = True, repeats: bool = True) -> None:
        row_type, column_type = _column_types(annotation)
        self.pack: Callable[..., Packed] = (
            functools.partial(_pack_columns, row_type) if row_type else pack
        )
        self._finish = column_type.rows if row_type else None
        self._builders: dict[bytes, Build | None] = {}
        self._repeats = repeats
        self._decode = msgspec.msgpack.Decoder(
            column_type if row_type else annotation,
            dec_hook=functools.partial(_decode_custom, functions),
            ext_hook=_decode_array,
        ).decode

    def unpack(self, packed: Packed, shared: SharedArrays | None = None) -> Any:
        """Decode a value. Arrays that it shares are mapped by `shared`.

        Raises: ContractError saying where the value does not fit the annotation.
        """
        body, payload = packed
        try:
            if build := self._builders.get(body):
                return build(_EMPTY + payload)  # a private copy, which all arrays share
            return self._unpack(body, payload, shared)
        except (
            msgspec.MsgspecError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ContractError(str(error)) from error

    def _unpack(self, body: bytes, payload: Any, shared: SharedArrays | None) -> Any:
        map_file = functools.cache(_no_files if shared is None else shared.map)
        is_shared = body[:1] == _IS_SHARED
        buffer = map_file(bytes(payload).decode()) if is_shared else _EMPTY + payload
        _decoding.buffer, _decoding.layouts, _decoding.map = buffer, {}, map_file
        value = self._decode(memoryview(body)[1:] if is_shared else body)
        if self._finish is not None:
            value = self._finish(value)
        # the name of a file comes once only
        if self._repeats and not map_file.cache_info().misses and body not in self._builders:
            store(self._builders, body, builder_for(value, _decoding.layouts))
        return value


def pack(value: Any, outgoing: Outgoing | None = None) -> Packed:
    """Encode a value that is made of plain data, dataclasses, arrays and importable functions.

    With `outgoing`, large arrays are shared with the receivers, which are processes of this host.
    Raises: ContractError naming what cannot cross, or when the other side would refuse the value as
    too large.
    """
    try:
        packer = _idle_packers.pop()
    except IndexError:  # other threads are using all of them
        packer = _Packer()
    try:
        packer.outgoing = outgoing
        body = packer.encode(value)
        is_large = outgoing is not None and packer.size >= SHARED_BYTES
        if is_large and len(body) <= MAX_BODY_BYTES and (file := packer.write()):
            return _IS_SHARED + body, file.name.encode()
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
        packer.arrays.clear()
        packer.size, packer.outgoing = 0, None
        _idle_packers.append(packer)


class _Packer:
    """Encodes one value at a time. It is reused, since making one takes as long as using it."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []  # buffers
        self.arrays: list[tuple[NDArray[Any], int]] = []  # of the chunks, with their offsets
        self.size = 0
        self.outgoing: Outgoing | None = None
        self.encode = msgspec.msgpack.Encoder(enc_hook=self._reference).encode

    def _reference(self, item: Any) -> Any:
        """Return what represents `item` in the body; the bytes of an array go to the payload."""
        if type(item) is not _array:  # a subclass, such as a masked array, is more than its bytes
            return _scalar_or_function(item)
        offset = self.size
        if self.outgoing is not None:
            if place := self.outgoing.place_of(item):
                return _named_array_reference(item, place)
            self.arrays.append((item, offset))
        size = item.nbytes
        if size < _COPY_BYTES or not item.flags.c_contiguous:
            self.chunks.append(item.tobytes())
        else:
            self.chunks.append(item.reshape(-1).view(np.uint8))
        if size % ALIGN_BYTES:
            self.chunks.append(_PADDING[: -size % ALIGN_BYTES])
            size += -size % ALIGN_BYTES
        self.size = offset + size
        return _array_reference(item.dtype, item.shape, offset)

    def write(self) -> SharedFile | None:
        """Write the payload to shared memory; None if there is no room for it."""
        assert self.outgoing is not None
        return self.outgoing.write(self.chunks, self.size, self.arrays)


_idle_packers: list[_Packer] = []


def _pack_columns(row_type: Any, value: Any, outgoing: Outgoing | None = None) -> Packed:
    """Encode a list of `row_type` by columns, and any other value as it is."""
    if isinstance(value, list) and all(isinstance(item, row_type) for item in value):
        value = row_type.to_columns(value)
    return pack(value, outgoing)


@functools.lru_cache(1024)
def _array_reference(
    dtype: np.dtype[Any], shape: tuple[int, ...], offset: int
) -> msgspec.msgpack.Ext:
    """Return what represents an array in a body."""
    name = _NAME_OF_DTYPE.get(dtype)
    if name is None:
        raise ContractError(f"an array of dtype {dtype} cannot cross between processes")
    return msgspec.msgpack.Ext(_ARRAY_CODE, _encode_array_ref((name, shape, offset)))


def _named_array_reference(array: NDArray[Any], place: SharedPlace) -> msgspec.msgpack.Ext:
    """Return what represents an array that lies in a file of shared memory."""
    name = _NAME_OF_DTYPE.get(array.dtype)
    reference = (place.file.name, (name, array.shape, place.offset))
    return msgspec.msgpack.Ext(_NAMED_ARRAY_CODE, _encode_array_ref(reference))


def _column_types(annotation: Any) -> tuple[Any, Any]:
    """Return how a list travels by columns: the class of its rows, and that of all together.

    `row_type.to_columns(list)` makes these, and `column_type.rows()` makes the list again. Returns
    None twice for what is no list of a class that can.
    """
    if typing.get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    row_type: Any = next(iter(typing.get_args(annotation)), None)
    if typing.get_origin(annotation) is not list or not hasattr(row_type, "to_columns"):
        return None, None
    return row_type, typing.get_type_hints(row_type.to_columns)["return"]


def _no_files(name: str) -> Any:
    raise ContractError(f"the value lies in {name!r}, and this process shares no arrays")


def _decode_array(code: int, data: memoryview) -> NDArray[Any]:
    if code == _NAMED_ARRAY_CODE:
        named = _decode_named_ref(data)
        dtype, shape = _DTYPE_OF_NAME[named.array.dtype], tuple(named.array.shape)
        return _array(shape, dtype, _decoding.map(named.file), named.array.offset)
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
    scalars = _array_scalars(annotation)
    if scalars is not None:
        if not isinstance(value, np.ndarray):
            raise msgspec.ValidationError(f"Expected `array`, got `{type(value).__name__}`")
        if scalars and not issubclass(value.dtype.type, scalars):
            raise msgspec.ValidationError(
                f"Expected an array of {scalars[0].__name__}, got {value.dtype}"
            )
        return value
    is_function = _is_function(annotation)
    if is_function and not functions:
        raise msgspec.ValidationError("a worker cannot return a function")
    if callable(value) or not is_function:
        raise msgspec.ValidationError(
            f"values annotated {annotation} cannot cross between processes"
        )
    return resolve_reference(msgspec.convert(value, FunctionRef))


@functools.cache
def _array_scalars(annotation: Any) -> tuple[type[np.generic], ...] | None:
    """Return the scalar types that an array may have, empty for any; None for no array."""
    if (typing.get_origin(annotation) or annotation) is not np.ndarray:
        return None
    dtypes = typing.get_args(annotation)[1:]
    scalars = [scalar for dtype in dtypes for scalar in typing.get_args(dtype)]
    return tuple(one for one in scalars if isinstance(one, type) and issubclass(one, np.generic))


@functools.cache
def _is_function(annotation: Any) -> bool:
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Callable)  # type: ignore[arg-type]
