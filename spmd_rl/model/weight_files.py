"""Safetensors files of a model folder and what their headers say; needs no torch."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from spmd_rl.errors import ConfigError
from spmd_rl.model.families import FAMILIES
from spmd_rl.model.families.folder_layout import ExpertPart, FolderLayout
from spmd_rl.model.foreign.names import folder_of
from spmd_rl.model.formats import mxfp4
from spmd_rl.model.formats.coded_weights import scale_name
from spmd_rl.model.formats.folders import file_formats
from spmd_rl.model.json_fields import read_object
from spmd_rl.model.read import ADAPTER, head_of, read_spec
from spmd_rl.model.spec import EMBEDDING, HEAD, VALUE_HEAD
from spmd_rl.types.code_format import CodeFormat

OWN_PREFIX = "model."  # of the network's names but those of heads
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
SCALES = ("F32", "F16", "BF16", "F8_E8M0")  # of weights in few bits
MXFP4 = "MXFP4"
UNREAD = "quantized weights are not read"
FREQUENCIES = "rotary_emb.inv_freq"  # old folders hold the frequencies, which the config gives


class StoredTensor(NamedTuple):
    """A tensor in a file, with its name there; `scales` are those of one in few bits.

    With `part`, it is an expert's part of what the file holds. Experts in MXFP4 are of dtype MXFP4.
    """

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    scales: StoredTensor | None = None
    part: ExpertPart | None = None


def has_weights(folder: str | Path) -> bool:
    return any((folder_of(folder) / name).is_file() for name in (SINGLE, INDEX))


def weight_files(folder: str | Path) -> list[Path]:
    """Return the files that transformers reads: model.safetensors, else those of the index.

    Raises: ConfigError if there are neither, if a file of the index is missing or outside the
    folder, or if there is an adapter.
    """
    path = folder_of(folder)
    single, index = path / SINGLE, path / INDEX
    if (path / ADAPTER).is_file():
        raise ConfigError(
            f"{folder} holds {ADAPTER}, and adapters are not applied: "
            "merge it into the weights first"
        )
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(
            f"{folder} holds no weights (neither {SINGLE} nor {INDEX}; "
            "a run with --trainer.init=random needs none)"
        )
    return [_inside(index, name) for name in _file_names(index)]


def _file_names(index: Path) -> list[str]:
    """Return the names of the files that an index maps weights to, each once."""
    names = read_object(index).get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise ConfigError(f"{index} has no object weight_map of file names")
    return sorted(set(names.values()))


def _inside(index: Path, name: str) -> Path:
    """Return the path of a file that the index names, which may lie in a folder beside it."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ConfigError(f"{index} names {name}, which is outside the model folder")
    if not (index.parent / name).is_file():
        raise ConfigError(f"{index} names {name}, which is not there")
    return index.parent / name


def stored_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's weight files by its name; only headers are read.

    Raises: as `tensors_in`; ConfigError for weights in few bits without scales of their blocks.
    """
    formats = file_formats()
    found = tensors_in(weight_files(folder), (*DTYPES, *SCALES, *formats, mxfp4.FILE_DTYPE))
    _read_mxfp4(found)
    for key in [key for key, one in found.items() if one.dtype in formats]:
        code_format, scales = formats[found[key].dtype], found.pop(scale_name(key), None)
        found[key] = _with_scales(found[key], scales, code_format)
    return found


def _with_scales(
    codes: StoredTensor, scales: StoredTensor | None, code_format: CodeFormat
) -> StoredTensor:
    """Return a weight in few bits. Raises: ConfigError for scales of another shape."""
    if scales is not None and scales.dtype not in SCALES:
        raise ConfigError(
            f"{scales.path} holds {scales.key} as {scales.dtype}, and scales are one of "
            f"{', '.join(SCALES)}"
        )
    shape = code_format.scale_shape(codes.shape) if len(codes.shape) == 2 else None
    if scales is None or scales.shape != shape:
        raise ConfigError(
            f"{codes.path} holds {codes.key} in {code_format.bits} bits, and not "
            f"{scale_name(codes.key)} with a scale for each block of {code_format.block_rows} x "
            f"{code_format.block_columns}"
        )
    return codes._replace(scales=scales)


def _read_mxfp4(found: dict[str, StoredTensor]) -> None:
    """Put experts in MXFP4 in place of their codes and scales.

    Raises: ConfigError for codes without such scales, and for other bytes.
    """
    for key in [key for key in found if key.endswith(mxfp4.CODES)]:
        codes, name = found.pop(key), key.removesuffix(mxfp4.CODES)
        scales = found.pop(name + mxfp4.SCALES, None)
        of_scales = () if scales is None else scales.shape
        shape = mxfp4.shape_of(codes.shape, of_scales, f"{codes.path}: {key}")
        found[name] = codes._replace(shape=shape, dtype=MXFP4, scales=scales)
    for others in (one for one in found.values() if one.dtype == mxfp4.FILE_DTYPE):
        raise ConfigError(f"{others.path} holds {others.key} as {others.dtype}: {UNREAD}")


def tensors_in(files: Sequence[Path], dtypes: Container[str] = DTYPES) -> dict[str, StoredTensor]:
    """Return every tensor of these files by its name; only headers are read.

    Raises: ConfigError if a file is broken, if two hold the same tensor, or if a tensor is not of
    one of these dtypes.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    if key in found:
                        raise ConfigError(
                            f"{path.parent}: {path.name} and {found[key].path.name} both hold {key}"
                        )
                    found[key] = _stored_tensor(path, key, file.get_slice(key), dtypes)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None
    return found


def _stored_tensor(path: Path, key: str, header: Any, dtypes: Container[str]) -> StoredTensor:
    """Return the tensor of a header. Raises: ConfigError unless it is of one of these dtypes."""
    dtype = header.get_dtype()
    if dtype not in dtypes:
        raise ConfigError(f"{path} holds {key} as {dtype}: {UNREAD}")
    return StoredTensor(path, key, tuple(header.get_shape()), dtype)


def stored_weights(
    folder: str | Path, shapes: Mapping[str, Sequence[int]]
) -> dict[str, StoredTensor]:
    """Return where every weight of a model lies, in the order of the files; reads headers only.

    A model with a tied head may be stored with the head alone. If the embedding is there too, the
    head is returned beside `shapes`, because the values must be compared. A model with a value head
    may be stored as a language model, whose own head is left out. So are tensors that the network
    does not use.
    Raises: ConfigError naming the first weight that is unknown, of another shape, or missing.
    """
    spec = read_spec(folder)
    layout = FAMILIES[spec.family].layout
    found = {
        name: one
        for key, stored in stored_tensors(folder).items()
        if not key.endswith(FREQUENCIES) and not key.startswith(spec.unused)
        for name, one in _of_experts(
            layout.own_name(own_name(key, spec.folder_prefix)), stored, layout
        )
    }
    wanted = dict(shapes)
    if VALUE_HEAD in wanted:
        found.pop(HEAD, None)
        if VALUE_HEAD not in found and head_of(folder) == "lm":
            del wanted[VALUE_HEAD]
    if HEAD in found and HEAD not in wanted and EMBEDDING in wanted:
        if EMBEDDING not in found:
            found = {EMBEDDING if key == HEAD else key: one for key, one in found.items()}
        else:
            wanted[HEAD] = wanted[EMBEDDING]
    _require_shapes(folder, found, wanted)
    return found


def own_name(key: str, prefix: str) -> str:
    """Return the network's name of a tensor in a folder where `prefix` stands for its `model.`."""
    return OWN_PREFIX + key.removeprefix(prefix) if prefix and key.startswith(prefix) else key


def _of_experts(
    key: str, one: StoredTensor, layout: FolderLayout
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a stored tensor by its name, or the tensors of each expert that it holds stacked.

    Raises: ConfigError for MXFP4 of a family whose folders are not published in it.
    """
    if one.dtype == MXFP4 and not layout.is_interleaved:
        raise ConfigError(f"{one.path} holds {one.key} as {MXFP4}: {UNREAD}")
    experts, _, kind = key.rpartition(".")
    parts = []
    if experts.endswith(".experts"):
        parts = list(layout.parts(kind, one.shape, in_rows=one.dtype == MXFP4))
    for name, shape, part in parts:
        yield f"{experts}.{name}", one._replace(shape=shape, part=part)
    if not parts:
        yield key, one


def unused_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Return where the tensors lie that the network of the folder's model does not use.

    Raises: as `read_spec` and `stored_tensors`.
    """
    beginnings = read_spec(folder).unused
    if not beginnings or not has_weights(folder):
        return {}
    stored = stored_tensors(folder)
    return {key: one for key, one in stored.items() if key.startswith(beginnings)}


def _require_shapes(
    folder: str | Path,
    found: Mapping[str, StoredTensor],
    wanted: Mapping[str, Sequence[int]],
) -> None:
    """Raise a ConfigError unless the weights that are found are those that are wanted."""
    for key, one in found.items():
        if key not in wanted:
            raise ConfigError(
                f"{folder} holds {key}, which the model of its config.json does not have"
            )
        if tuple(wanted[key]) != one.shape:
            raise ConfigError(
                f"{folder}: {one.key} is {list(one.shape)}, "
                f"and the config asks for {list(wanted[key])}"
            )
    if missing := set(wanted) - set(found):
        raise ConfigError(
            f"{folder} lacks {len(missing)} weights of its config, first {min(missing)}"
        )
