"""Network of `transformers`, with the contract of our own: packed tokens in, hidden states out.

Sequences are padded to rows of one length. Padding comes last, where no token sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.model.foreign.names import folder_of
from spmd_rl.model.lora import NO_LORA
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import WHOLE
from spmd_rl.model.spec import ModelSpec


def skeleton(model: str | Path) -> Any:
    """Return the network of a model folder, whose parameters are on the meta device.

    Its buffers, such as rotary frequencies, are real: no file holds them.
    Raises: ConfigError where transformers has no causal model for the folder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = folder_of(model)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with _parameters_on_meta():
            network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"transformers has no causal model for {folder}: {error}") from None
    if network.get_decoder() is network or network.get_output_embeddings() is None:
        raise ConfigError(f"{folder}: {type(network).__name__} has no head beside its layers")
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{folder} is quantized, and transformers would not train its weights")
    trained = dict(network.named_parameters(remove_duplicate=False))
    if others := sorted(network.state_dict().keys() - trained.keys()):
        raise ConfigError(f"{folder} stores {others[0]}, which is no parameter, and is not read")
    return network.train(False)  # nothing is dropped


def decoder_layers(network: Any) -> tuple[str, nn.ModuleList]:
    """Return the layers of a network's decoder, and their name: its largest list of modules.

    Raises: ConfigError where there is none.
    """
    inside = set(network.get_decoder().modules())
    lists = [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, nn.ModuleList) and module in inside
    ]
    if not lists:
        raise ConfigError(f"{type(network).__name__} has no list of layers")
    return max(lists, key=lambda one: sum(map(torch.numel, one[1].parameters())))


class ForeignLM(CausalLM):
    """A causal model of `transformers`; parameters have the names that they have there.

    They are on the meta device, until `materialise` or FSDP gives them memory.
    """

    def __init__(self, spec: ModelSpec, model: str | Path) -> None:
        nn.Module.__init__(self)
        self.spec = self.own_spec = spec
        self.exponents, self.lora, self.part = None, NO_LORA, WHOLE
        self.network = network = skeleton(model)
        self._layers = list(decoder_layers(network)[1])
        _separate_head(network)
        self._given: list[Tensor] = []  # hidden states for the next pass of the head alone
        self._answer: type[Any] = dict  # of a pass of the layers
        self._decoder = (network.get_decoder(),)  # in a tuple, it is no second module of this one
        self._intercept(self._decoder[0])

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self._layers

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        network = cast(nn.Module, self.network)
        return network.named_parameters(prefix, recurse, remove_duplicate)

    def contract(
        self, device: torch.device, dtype: torch.dtype, attention_split: int = 0
    ) -> dict[str, str | int]:
        import transformers

        return {
            "impl": f"transformers {transformers.__version__}",
            "torch": str(torch.__version__),
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
        }

    def hidden_states(self, tokens: Tensor, lengths: NDArray[np.int32]) -> Tensor:
        """Return the hidden states that the head reads, of sequences that lie end to end.

        Shape: tokens [T] int64, lengths [N] on the host; returns [T, C].
        """
        count, width = len(lengths), int(lengths.max())
        is_token = upload(np.arange(width) < lengths[:, None], tokens.device)
        padded = tokens.new_zeros(count, width)
        padded[is_token] = tokens
        return self._pass(input_ids=padded, attention_mask=is_token.long())[0][is_token]

    def next_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits after rows of equally many tokens, and the cache that has these too.

        `cache` is that of the tokens before, None at the start and from a model without one.
        Shape: tokens [M, L] int64; returns [M, V] fp32.
        """
        hidden, after = self._pass(input_ids=tokens, past_key_values=cache, use_cache=True)
        return self.logits(hidden[:, -1]), after

    def logits(self, hidden: Tensor) -> Tensor:
        """Return what the network makes of hidden states after its layers: head, scale and cap."""
        self._given.append(hidden.unsqueeze(0))
        try:
            nothing = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
            answer: Tensor = self.network(input_ids=nothing, use_cache=False).logits
            if self._given:
                raise ConfigError(f"the head of {type(self.network).__name__} does not run alone")
        finally:
            self._given.clear()
        return answer[0].float()

    def materialise(self, device: torch.device, dtype: torch.dtype) -> ForeignLM:
        """Give parameters memory, whose content is unset, and move buffers to the device."""

        def placed(one: Tensor) -> Tensor:
            return torch.empty(one.shape, dtype=dtype, device=device) if one.is_meta else one

        return self._apply(placed).to(device).requires_grad_(False)

    def _pass(self, use_cache: bool = False, **inputs: Any) -> tuple[Tensor, Any]:
        given = {name: one for name, one in inputs.items() if one is not None}
        answer = self._decoder[0](**given, use_cache=use_cache)
        self._answer = type(answer)
        return answer.last_hidden_state, getattr(answer, "past_key_values", None)

    def _intercept(self, decoder: Any) -> None:
        """Have the pass of the layers give what `logits` was given, so that the head alone runs."""
        plain = decoder.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._given:
                return plain(*args, **kwargs)
            return self._answer(last_hidden_state=self._given.pop())

        decoder.forward = forward


class TiedHead(nn.Module):
    """A head whose weight is the embedding's, without being a parameter of its own."""

    def __init__(self, embedding: nn.Module, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, it is no module of this one
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self._embedding[0].weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


def _separate_head(network: Any) -> None:
    """Have no module share a parameter of another, so that each can be replaced by itself.

    Raises: ConfigError for others that share one.
    """
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if head.weight is embedding.weight:
        network.set_output_embeddings(TiedHead(embedding, getattr(head, "bias", None)))
    counts = [len(list(network.named_parameters(remove_duplicate=one))) for one in (True, False)]
    if counts[0] != counts[1]:
        raise ConfigError(
            f"{type(network).__name__} has layers that share parameters, which is not supported"
        )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Have modules that are made meanwhile put their parameters on the meta device.

    One that is there already stays the same object, as one that is tied must.
    """
    plain = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        plain(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]
