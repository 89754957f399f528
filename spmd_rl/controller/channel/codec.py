"""Values on the wire: plain data and dataclasses as msgpack, arrays as raw bytes, functions by
name. No pickle.

Arrays of a value lie end to end in one payload; each leaves its dtype, shape and offset in the
msgpack as an extension. A class may bring `to_columns`, by which a list of it travels as a few long
arrays. Decoding follows the receiving endpoint's annotation, strictly, and gives arrays that share
one buffer of their own.
"""

from __future__ import annotations

import functools
import importlib
import threading
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.controller.channel.decode_cache import Build, like, remember
from spmd_rl.errors import ContractError

MAX_BODY_BYTES = 256 << 20
MAX_PAYLOAD_BYTES = 8 << 30
ALIGN_BYTES = 16
_ARRAY = 1  # the one extension code

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
NOTHING: Packed = (b"", b"")  # goes with a message that needs no value


class _ArrayRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: DType
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=16)]
    offset: Annotated[int, msgspec.Meta(ge=0, multiple_of=ALIGN_BYTES)]


_NAMES: dict[Any, DType] = {np.dtype(name): name for name in _DTYPES}
_NATIVE = {name: dtype for dtype, name in _NAMES.items()}
_encode_reference = msgspec.msgpack.Encoder().encode
_decode_reference = msgspec.msgpack.Decoder(_ArrayRef).decode
_array = np.ndarray
# and bytes are another bytearray, in half of the time that its constructor takes
_EMPTY = bytearray()
# of the value that this thread is decoding: the `buffer` of its arrays, and their `places`
_open = threading.local()


class _FunctionRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function by "module:qualname", and the keyword arguments bound to it."""

    function: str
    kwargs: dict[str, Any]


class Codec:
    """How the values of one annotation cross; without `functions` nothing is imported to decode
    one.

    `pack` encodes one, as the function of that name does.
    """

    def __init__(self, annotation: Any, *, functions: bool = True) -> None:
        columns = _columns(annotation)
        self.pack: Callable[[Any], Packed] = (
            functools.partial(_pack_columns, columns.of) if columns else pack
        )
        self._finish = columns.type.rows if columns else None
        self._known: dict[bytes, Build | None] = {}
        self._decode = msgspec.msgpack.Decoder(
            columns.type if columns else annotation,
            dec_hook=functools.partial(_custom, functions),
            ext_hook=_array_in,
        ).decode

    def unpack(self, packed: Packed) -> Any:
        """Decode a value.

        Raises: ContractError saying where the value does not fit the annotation.
        """
        body, payload = packed
        buffer = _EMPTY + payload  # of the receiver's own, shared by all arrays
        try:
            if build := self._known.get(body):
                return build(buffer)
            _open.buffer, _open.places = buffer, {}
            value = self._decode(body)
            if self._finish is not None:
                value = self._finish(value)
            if body not in self._known:
                remember(self._known, body, like(value, _open.places))
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

    Raises: ContractError naming what cannot cross, or when it exceeds what another process would
    take.
    """
    try:
        packer = _idle.pop()
    except IndexError:  # others are at it, on other threads
        packer = _Packer()
    try:
        body = packer.encode(value)
        if len(body) > MAX_BODY_BYTES or packer.size > MAX_PAYLOAD_BYTES:
            raise ContractError(
                f"a value of {len(body)} + {packer.size} bytes exceeds the wire's limits of {MAX_BODY_BYTES} (plain "
                f"data) and {MAX_PAYLOAD_BYTES} (arrays): pass less at once"
            )
        return body, b"".join(packer.chunks)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ContractError(f"a value cannot cross between processes: {error}") from error
    finally:
        packer.chunks.clear()
        packer.size = 0
        _idle.append(packer)


class _Packer:
    """Encodes one value at a time. It is kept for the next: to make one takes as long as to use it."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.size = 0
        self.encode = msgspec.msgpack.Encoder(enc_hook=self._reference).encode

    def _reference(self, item: Any) -> Any:
        """What stands in the body for `item`; the bytes of an array go to the payload."""
        if type(item) is not _array:  # a subclass, such as a masked array, is more than its bytes
            return _scalar_or_function(item)
        raw, offset = item.tobytes(), self.size
        size = len(raw)
        if size % ALIGN_BYTES:
            raw += bytes(-size % ALIGN_BYTES)
            size = len(raw)
        self.chunks.append(raw)
        self.size = offset + size
        return _reference(item.dtype, item.shape, offset)


_idle: list[_Packer] = []


def _pack_columns(of: Any, value: Any) -> Packed:
    """Encode a list of the class `of` by columns, and anything else as it is."""
    if isinstance(value, list) and all(isinstance(item, of) for item in value):
        value = of.to_columns(value)
    return pack(value)


@functools.lru_cache(1024)
def _reference(dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> msgspec.msgpack.Ext:
    """What stands in a body for an array at this place of the payload."""
    name = _NAMES.get(dtype)
    if name is None:
        raise ContractError(f"an array of dtype {dtype} cannot cross between processes")
    return msgspec.msgpack.Ext(_ARRAY, _encode_reference((name, shape, offset)))


def name_of(item: Callable[..., Any] | type) -> str:
    """ "module:qualname" of a function or class.

    Raises: ContractError when another process could not import it by that name.
    """
    module, qualname = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if module is None or qualname is None or module == "__main__" or "<" in qualname:
        raise ContractError(
            f"{qualname or item!r} cannot cross between processes: define it at the top of a module"
        )
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


class _Columns(NamedTuple):
    """The class `of` travels as `type` where there is a list of it: `of.to_columns(list)` and
    `type.rows()`.
    """

    of: Any
    type: Any


def _columns(annotation: Any) -> _Columns | None:
    if typing.get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    of: Any = typing.get_args(annotation)[0] if typing.get_origin(annotation) is list else None
    return (
        _Columns(of, typing.get_type_hints(of.to_columns)["return"])
        if hasattr(of, "to_columns")
        else None
    )


def _array_in(code: int, data: memoryview) -> NDArray[Any]:
    if code != _ARRAY:
        raise msgspec.ValidationError(f"unknown extension {code}")
    reference = _decode_reference(data)
    dtype, shape, offset = _NATIVE[reference.dtype], tuple(reference.shape), reference.offset
    array = _array(shape, dtype, _open.buffer, offset)
    _open.places[id(array)] = shape, dtype, offset
    return array


def _scalar_or_function(item: Any) -> Any:
    if isinstance(item, np.generic):
        return item.item()
    if isinstance(item, _array):
        raise ContractError(
            f"a {type(item).__qualname__} cannot cross between processes: pass a plain numpy.ndarray"
        )
    if callable(item):
        return _function_out(item)
    raise ContractError(
        f"a {type(item).__qualname__} cannot cross between processes: pass plain data or arrays"
    )


def _function_out(function: Callable[..., Any]) -> _FunctionRef:
    if isinstance(function, functools.partial):
        if function.args:
            raise ContractError(
                f"bind {function.func.__name__}'s arguments by keyword: positional ones cannot cross"
            )
        return _FunctionRef(name_of(function.func), function.keywords)
    if not isinstance(function, types.FunctionType | type):
        raise ContractError(
            f"a {type(function).__qualname__} cannot cross between processes: pass a function"
        )
    return _FunctionRef(name_of(function), {})


def _custom(functions: bool, annotation: Any, value: Any) -> Any:
    """Decode what msgspec does not know: array annotations and, where the sender may choose an
    import, functions.
    """
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
    reference = msgspec.convert(value, _FunctionRef)
    function = resolve(reference.function)
    return functools.partial(function, **reference.kwargs) if reference.kwargs else function


class _Kind(NamedTuple):
    """What an annotation that msgspec does not know asks for; `scalars` of an array, empty for any."""

    scalars: tuple[type[np.generic], ...] | None
    is_function: bool


@functools.cache
def _kind(annotation: Any) -> _Kind:
    origin = typing.get_origin(annotation) or annotation
    if origin is np.ndarray:
        scalars = [
            scalar for dtype in typing.get_args(annotation)[1:] for scalar in typing.get_args(dtype)
        ]
        known = (
            scalar
            for scalar in scalars
            if isinstance(scalar, type) and issubclass(scalar, np.generic)
        )
        return _Kind(tuple(known), False)
    return _Kind(None, isinstance(origin, type) and issubclass(origin, Callable))  # type: ignore[arg-type]
