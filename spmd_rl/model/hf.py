"""Weights of Hugging Face model folders: read and written as safetensors."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.low_precision.block_codes import decode, torch_dtype
from spmd_rl.model.companion_files import MODEL_FILES, copy_files
from spmd_rl.model.families import FAMILIES
from spmd_rl.model.families.folder_layout import ExpertPart
from spmd_rl.model.folder_names import TypedTensor, as_in_folder
from spmd_rl.model.foreign.names import folder_of, is_foreign
from spmd_rl.model.formats import FORMATS, WeightFormat, mxfp4
from spmd_rl.model.formats.coded_tensors import (
    as_codes,
    as_rounded,
    format_written_as,
    holds_codes,
)
from spmd_rl.model.formats.coded_weights import coded_shapes, scale_name
from spmd_rl.model.formats.folders import CONFIG_KEY, file_formats, quantization_config
from spmd_rl.model.lora import B
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import VALUE_ARCHITECTURE, read_spec
from spmd_rl.model.spec import EMBEDDING, HEAD, VALUE_HEAD, Head, ModelSpec
from spmd_rl.model.weight_files import (
    MXFP4,
    StoredTensor,
    stored_tensors,
    stored_weights,
    unused_tensors,
)
from spmd_rl.observe import atomic_write

SHARD_BYTES = 4 << 30


def read_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the folder's weight files, on the CPU. Raises: as `stored_tensors`."""
    return read_stored(stored_tensors(folder))


def model_weights(
    folder: str | Path, shapes: Mapping[str, Sequence[int]], held: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a model with these `shapes`, in the folder's order and dtype.

    With `held`, others are checked and not read. A value head that the folder lacks is zero.
    Raises: as `stored_weights`, before the first; ConfigError if a tied head differs from the
    embedding.
    """
    stored = stored_weights(folder, shapes)
    if HEAD not in shapes and HEAD in stored:
        head, embedding = (
            tensor for _, tensor in read_stored({key: stored[key] for key in (HEAD, EMBEDDING)})
        )
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise ConfigError(
                f"{folder}: tie_word_embeddings is true, and {HEAD} is not {EMBEDDING}: "
                "set it to false, or remove that weight"
            )
        del stored[HEAD]
    yield from read_stored(
        {name: one for name, one in stored.items() if held is None or name in held}
    )
    if VALUE_HEAD in shapes and VALUE_HEAD not in stored:
        yield VALUE_HEAD, torch.zeros(tuple(shapes[VALUE_HEAD]))


def read_stored(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors; a file is opened once for those that follow each other."""
    for path, group in itertools.groupby(stored.items(), key=lambda item: item[1].path):
        with safe_open(path, framework="pt") as file:
            for name, one in group:
                tensor = _stored(file, one)
                coded = one.scales is not None and one.dtype != MXFP4
                yield name, _decoded(tensor, one) if coded else tensor


def _stored(file: Any, one: StoredTensor) -> Tensor:
    part = one.part
    if part is None:
        if one.dtype == MXFP4:
            raise ConfigError(f"{one.path}: {one.key} is no expert's, and in MXFP4")
        return cast(Tensor, file.get_tensor(one.key))
    stacked = file.get_slice(one.key)
    if one.dtype != MXFP4 and part.step == 1 and not part.is_transposed:
        return cast(Tensor, stacked[part.expert, part.start : part.start + one.shape[0]])
    return _of_expert(one, stacked[part.expert], part)


def _of_expert(one: StoredTensor, whole: Tensor, part: ExpertPart) -> Tensor:
    rows = slice(part.start, part.start + one.shape[0] * part.step, part.step)
    if one.dtype == MXFP4:
        assert one.scales is not None
        with safe_open(one.scales.path, framework="pt") as file:
            scales = file.get_slice(one.scales.key)[part.expert]
        found = mxfp4.numbers(whole[rows], scales[rows])
        if not torch.isfinite(found).all():
            raise ConfigError(f"{one.path}: {one.key} holds numbers that are not finite")
        return found
    return (whole.t() if part.is_transposed else whole)[rows].contiguous()


def _decoded(codes: Tensor, weight: StoredTensor) -> Tensor:
    """Return what a stored weight in few bits stands for, in float32.

    A scale may be zero where all codes of its block are, as some programs write such a block.
    Raises: ConfigError for other scales and codes that stand for no number.
    """
    scales = weight.scales
    assert scales is not None
    found = _checked_scales(scales, codes.dtype)
    code_format = file_formats()[weight.dtype]
    numbers = decode(code_format, codes, found, weight.shape[1], torch.float32)
    if not torch.isfinite(numbers).all():
        raise ConfigError(f"{weight.path}: {weight.key} holds NaN: convert the model again")
    if not found.all() and ((numbers == 0) & (codes.float() != 0)).any():
        raise ConfigError(
            f"{scales.path}: {scales.key} holds a scale of 0 for weights that are not 0: "
            "convert the model again"
        )
    return numbers


def _checked_scales(scales: StoredTensor, code_dtype: torch.dtype) -> Tensor:
    with safe_open(scales.path, framework="pt") as file:
        found = file.get_tensor(scales.key).float()
    if not ((found >= 0) & torch.isfinite(found * torch.finfo(code_dtype).max)).all():
        raise ConfigError(
            f"{scales.path}: {scales.key} holds scales that are negative or NaN, or so large that "
            "weights are not finite: convert the model again"
        )
    return found


def load_weights(model: CausalLM, folder: str | Path, weights: WeightFormat = "full") -> None:
    """Fill the parameters of `model` from the folder, cast to their dtype.

    Weights that `weights` says are in few bits become codes where the model holds codes. Elsewhere
    they become what their codes stand for.

    Raises: as `model_weights`.
    """
    held = dict(model.named_parameters())
    tensors = model_weights(folder, model.spec.parameter_shapes(), held)
    convert = as_codes if holds_codes(model) else as_rounded
    fill(model, own_parts(model, convert(tensors, model.spec, weights)))


def own_parts(
    model: CausalLM, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield of each weight what the model has of it, which may be a part."""
    boxes = model.part.boxes(model.spec) if model.part.count > 1 else {}
    for name, tensor in weights:
        if name in boxes:
            tensor = tensor[boxes[name].index]
        yield name, tensor


@torch.no_grad()
def fill(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Set parameters of `model` by name, cast to their dtype; the others stay as they are."""
    wanted = dict(model.named_parameters())
    for name, tensor in weights:
        wanted[name].copy_(tensor)


def random_weights(
    spec: ModelSpec, seed: int, head: Head = "lm", held: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's initial weights in fp32, each a function of the seed and its name.

    With `held`, others are left out.
    Matrices are normal, biases and a value head zero, norms one. Those that write to the residual
    stream are scaled down by the depth.
    Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3.
    """
    depth = 1.0 / math.sqrt(2 * spec.num_layers)
    generator = torch.Generator()
    if head == "value":
        yield VALUE_HEAD, torch.zeros(spec.parameter_shapes(head)[VALUE_HEAD])
    for order, one in enumerate(sorted(spec.parameters(), key=lambda tensor: tensor.name)):
        if (one.name == HEAD and head == "value") or (held is not None and one.name not in held):
            continue
        generator.manual_seed(((seed << 20) + order) % (1 << 63))
        if len(one.shape) == 1:
            yield one.name, torch.full(one.shape, 0.0 if one.name.endswith("bias") else one.start)
            continue
        scale = depth if one.writes_residual else 1.0
        yield one.name, torch.randn(one.shape, generator=generator) * (spec.init_std * scale)


def random_adapters(shapes: Mapping[str, Sequence[int]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield initial adapters in fp32, each a function of the seed and its name's place.

    A is uniform in +-1 / sqrt(in), as PEFT has it, and B is zero: the model is its base.
    """
    generator = torch.Generator()
    for order, (name, shape) in enumerate(sorted(shapes.items())):
        if name.endswith(f".{B}.weight"):
            yield name, torch.zeros(tuple(shape))
            continue
        generator.manual_seed(((seed << 20) + (1 << 19) + order) % (1 << 63))
        uniform = torch.rand(tuple(shape), generator=generator)
        yield name, (2 * uniform - 1) / math.sqrt(shape[1])


def save_folder(
    folder: str | Path,
    like: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
    head: Head = "lm",
) -> None:
    """Write a folder that `transformers` loads, as a sequence classifier if it has a value head.

    Weights come from `tensors`; config and tokenizer files are copied from the folder `like`, and
    so are tensors that the network does not use. Fixed parameters stay float32. The folder is
    written beside its final name, then renamed over an earlier one, so it is never seen half
    written. With the dtype of a format's codes, what is not in few bits is in bfloat16.
    """
    target = Path(folder)
    part = atomic_write.begin_folder(target)
    if is_foreign(like):
        _write_foreign(part, like, tensors, dtype)
    else:
        _write_own(part, like, tensors, dtype, head)
    atomic_write.finish_folder(target)


def _write_foreign(
    part: Path, like: str | Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Have transformers write the weights of its network. Raises: ConfigError for 8 bits."""
    from spmd_rl.model.foreign.weights import write_foreign

    if format_written_as(dtype) != "full":
        raise ConfigError(f"{like} is not written in few bits: give --dtype=bfloat16")
    write_foreign(part, like, tensors, dtype)
    _copy_config_and_tokenizer(folder_of(like), part, dtype, "lm", {})


def _write_own(
    part: Path,
    like: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    head: Head,
) -> None:
    spec, extra = read_spec(like), dict[str, Any]()
    dtypes = dict.fromkeys(spec.fixed_names(), torch.float32)
    if (weights := format_written_as(dtype)) != "full":
        tensors = as_codes(tensors, spec, weights)
        extra[CONFIG_KEY] = quantization_config(spec, FORMATS[weights])
        scale_dtype = torch_dtype(FORMATS[weights].scale_dtype)
        for name in coded_shapes(spec, weights):
            dtypes |= {name: dtype, scale_name(name): scale_dtype}
        dtype = torch.bfloat16
    _copy_config_and_tokenizer(Path(like), part, dtype, head, extra)
    typed = ((name, one, dtypes.get(name, dtype)) for name, one in tensors)
    unused = ((name, one, one.dtype) for name, one in read_stored(unused_tensors(like)))
    _write_shards(part, itertools.chain(as_in_folder(typed, spec, like), unused))


def _copy_config_and_tokenizer(
    like: Path, folder: Path, dtype: torch.dtype, head: Head, extra: Mapping[str, Any]
) -> None:
    """Copy the files that are no weights. The copied config names `dtype` and a value head.

    It says `extra` too, and nothing of how the weights of `like` were quantized.
    """
    copy_files(like, folder, MODEL_FILES)
    config = json.loads((folder / "config.json").read_text())
    config.pop(CONFIG_KEY, None)
    config |= extra
    config["torch_dtype"] = config["dtype"] = str(dtype).removeprefix("torch.")
    if head == "value":
        config["architectures"] = [FAMILIES[config["model_type"]].class_name + VALUE_ARCHITECTURE]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # one number
        if config.get("pad_token_id") in _eos_ids(config):
            # transformers would read the score before the end-of-text token of a sequence
            config["pad_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _eos_ids(config: Mapping[str, Any]) -> list[Any]:
    eos = config.get("eos_token_id")
    return [one for one in (eos if isinstance(eos, list) else [eos]) if one is not None]


def _write_shards(folder: Path, tensors: Iterable[TypedTensor]) -> None:
    names: list[list[str]] = []
    total_bytes = 0
    for number, shard in enumerate(_by_shard(tensors)):
        save_file(shard, folder / f"shard-{number}.safetensors", metadata={"format": "pt"})
        names.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    _name_shards(folder, names, total_bytes)


def _by_shard(tensors: Iterable[TypedTensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each shard, on the CPU. A shard is empty once the next is asked for."""
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor, dtype in tensors:
        tensor = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if shard and num_bytes + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard.clear()  # so that memory holds one shard at a time
            num_bytes = 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    yield shard


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Rename the shards as Hugging Face does, and write the index if there are several."""
    if len(shards) == 1:
        os.rename(folder / "shard-0.safetensors", folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"shard-{number}.safetensors", folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
