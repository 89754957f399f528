"""Megatron-core's optimizer over the chunks of a rank: its groups, its state as boxes, its step.

Its own clipping and schedule are left out: the learner does both for all backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.train.backend import State
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.megatron.model import check_names
from spmd_rl.train.megatron.parameters import Parameter
from spmd_rl.train.optimizer.adamw import MOMENTS
from spmd_rl.train.optimizer.host_stack import Reserve
from spmd_rl.train.optimizer.parameter_groups import UpdateRule
from spmd_rl.train.optimizer.streamed_adamw import StreamedAdamW
from spmd_rl.train.optimizer.torch_groups import LR_SCALE, set_rates, state_tensors
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Box


class MegatronOptimizer:
    """AdamW over `parameters`, with float32 masters of weights in bfloat16.

    Experts have a part of their own, because other ranks hold copies of them.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        parameters: Sequence[Parameter],
        rules: Mapping[str, UpdateRule],
        cfg: TrainerConfig,
        settings: MegatronConfig,
        groups: Any,
    ) -> None:
        self._chunks, self._parameters = chunks, parameters
        self._rules, self._cfg = rules, cfg
        self._offload = settings.offload
        self._is_first_along_tp = groups.tp.rank() == 0
        self._is_distributed = settings.distributed_optimizer
        self._parts: list[Any] = []
        self._num_copies: list[int] = []  # ranks that have equal gradients of each part
        for is_expert, copies in ((False, groups.dp_cp), (True, groups.expt_dp)):
            own = [one for one in parameters if one.is_expert == is_expert]
            if own:
                self._parts.append(
                    _build_part(chunks, own, rules, cfg, settings, groups, is_expert)
                )
                self._num_copies.append(1 if self._is_distributed else copies.size())
        self._streams: list[StreamedAdamW] = []  # of each part, where moments are on the host

    def allocate(self, reserve: Reserve) -> None:
        """Allocate the moments, so that a checkpoint can be loaded before a step.

        With trainer.backend.offload, `reserve` finds their room in host memory. Raises: as it does.
        """
        for number, part in enumerate(self._parts):
            if self._offload == "none":
                _allocate(part)
            else:
                self._streams.append(self._streamed(number, reserve))

    def weights(self) -> Iterator[Tensor]:
        """Yield the memory of this rank's weights and masters."""
        for parameter in self._parameters:
            yield parameter.tensor
            if (held := self.master(parameter)) is not None:
                yield held[0]

    def moments(self) -> Iterator[Tensor]:
        """Yield the memory of this rank's moments on the device, and of their counts of steps."""
        for part in () if self._streams else self._parts:
            yield from state_tensors(part.optimizer)

    def square_norm(self) -> float:
        """Return this rank's share of the squared norm: what several ranks hold counts once."""
        total = 0.0
        for part, copies in zip(self._parts, self._num_copies, strict=True):
            part.prepare_grads()
            if gradients := list(_counted_gradients(part, self._is_first_along_tp)):
                total += float(torch.nn.utils.get_total_norm(gradients)) ** 2 / copies
        return total

    def step(self, lr: float, grad_scale: float) -> None:
        """Update the weights; `square_norm` was called before.

        Ranks: all of the role. Blocks: until each shard of the weights is gathered again.
        """
        for number, part in enumerate(self._parts):
            gradients = [one.grad for one in part.get_parameters() if one.grad is not None]
            if grad_scale != 1.0 and gradients:
                torch._foreach_mul_(gradients, grad_scale)
            if self._streams:
                # Megatron-core's step calls it between its own copies and gathers
                part.optimizer.step = partial(self._streams[number].step, lr)
            else:
                set_rates(part.optimizer, lr)
            part.step_with_ready_grads()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for part in self._parts:
            part.zero_grad()

    def state(self) -> State:
        """Return the float32 weights and both moments, of this rank's ranges."""
        found: dict[str, list[Any]] = {kind: [] for kind in ("weights", *MOMENTS)}
        streamed = self._streamed_moments()
        for parameter in self._parameters:
            if (held := self.master(parameter)) is not None:
                master, start = held
                found["weights"] += parameter.named(master, start)
                own = streamed.get(parameter.name) or self._part(parameter).optimizer.state[master]
                for kind in MOMENTS:
                    found[kind] += parameter.named(own[kind], start)
        return found

    def _streamed_moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments in host memory by parameter and kind, if they are there."""
        found: dict[str, dict[str, Tensor]] = {}
        for stream in self._streams:
            for kind, tensors in stream.state().items():
                for name, tensor in tensors:
                    found.setdefault(name, {})[kind] = tensor.local
        return found

    def on_loaded(self, optimizer_steps: int) -> None:
        """Go on from a `state` that was written: with its steps, and the weights of its masters.

        Ranks: all of the role. Blocks: until each shard of the weights is gathered again.
        """
        for stream in self._streams:
            stream.on_loaded(optimizer_steps)
        for part in self._parts:
            for group in part.optimizer.param_groups:
                if "step" in group:  # where transformer-engine's optimizer counts them
                    group["step"] = optimizer_steps
            for moments in part.optimizer.state.values():
                if "step" in moments:
                    moments["step"].fill_(optimizer_steps)
        self.write_weights()

    @torch.no_grad()
    def write_weights(self) -> None:
        """Set the model's weights to those of the masters.

        Ranks: all of the role. Blocks: until each shard of the weights is gathered again.
        """
        for part in self._parts:
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        if self._is_distributed:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    def _part(self, parameter: Parameter) -> Any:
        return self._parts[-1 if parameter.is_expert else 0]

    def _streamed(self, number: int, reserve: Reserve) -> StreamedAdamW:
        """Return the optimizer of a part's masters, whose moments are in host memory."""
        shards, rules = {}, {}
        for parameter in self._parameters:
            held = self.master(parameter)
            if held is not None and self._part(parameter) is self._parts[number]:
                master, start = held
                flat = Box((start,), (master.numel(),))
                shards[parameter.name] = LocalTensor((prod(parameter.shape),), flat, master)
                rules[parameter.name] = self._rules[parameter.parts[0].name]
        return StreamedAdamW(shards, rules, self._cfg, reserve)

    def master(self, parameter: Parameter) -> tuple[Tensor, int] | None:
        """Return this rank's range of a parameter in float32, and where it starts."""
        tensor, part = parameter.tensor, self._part(parameter)
        if not self._is_distributed:
            return getattr(tensor, "main_param", tensor), 0
        if tensor not in part.model_param_group_index_map:
            return None
        group, place = part.model_param_group_index_map[tensor]
        master = part.optimizer.param_groups[group]["params"][place]
        start = part._get_model_param_range_map(tensor)["param"].start
        return master, start


def _counted_gradients(part: Any, is_first_along_tp: bool) -> Iterator[Tensor]:
    """Yield the gradients of which this rank counts the norm.

    A parameter that two stages share counts once, and so does one that all ranks along tp have. Its
    marks are Megatron-core's, whose own method has another name in each version.
    """
    for parameter in part.get_parameters():
        is_counted = is_first_along_tp or parameter.tensor_model_parallel
        if parameter.grad is not None and is_counted and not getattr(parameter, "shared", False):
            yield parameter.grad


def _build_part(
    chunks: Sequence[Any],
    parameters: Sequence[Parameter],
    rules: Mapping[str, UpdateRule],
    cfg: TrainerConfig,
    settings: MegatronConfig,
    groups: Any,
    is_expert: bool,
) -> Any:
    """Return the optimizer of some parameters.

    Megatron-core's public function would gather pickled groups over the whole world.
    """
    from megatron.core.optimizer import _get_megatron_optimizer_based_on_param_groups

    model_group = groups.tp_ep_pp if is_expert else groups.mp
    buffers = "expert_parallel_buffers" if is_expert else "buffers"
    return _get_megatron_optimizer_based_on_param_groups(
        config=_optimizer_config(cfg, settings),
        model_chunks=list(chunks),
        param_groups=_param_groups(parameters, rules, cfg, is_expert),
        per_model_buffers={number: getattr(chunk, buffers) for number, chunk in enumerate(chunks)},
        model_parallel_group=model_group,
        data_parallel_group=groups.expt_dp if is_expert else groups.dp_cp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=model_group.rank(),
        intra_dist_opt_group=groups.intra_dist_opt,
        distributed_optimizer_instance_id=0,
        pg_collection=groups,
    )


def _optimizer_config(cfg: TrainerConfig, settings: MegatronConfig) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    check_names("optimizer_options", settings.optimizer_options, OptimizerConfig)
    return OptimizerConfig(
        optimizer="adam",
        lr=cfg.lr,
        min_lr=cfg.lr,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.betas[0],
        adam_beta2=cfg.betas[1],
        adam_eps=cfg.eps,
        clip_grad=0.0,
        bf16=cfg.dtype == "bfloat16",
        params_dtype=getattr(torch, cfg.dtype),
        use_distributed_optimizer=settings.distributed_optimizer,
        **settings.optimizer_options,
    )


def _param_groups(
    parameters: Sequence[Parameter],
    rules: Mapping[str, UpdateRule],
    cfg: TrainerConfig,
    is_expert: bool,
) -> list[dict[str, Any]]:
    """Return a group for each rule. Raises: ConfigError where a parameter has two rules."""
    members: dict[UpdateRule, list[Any]] = {}
    for parameter in parameters:
        (rule, name), *others = dict.fromkeys((rules[p.name], p.name) for p in parameter.parts)
        for other_rule, other_name in others:
            if other_rule != rule:
                raise ConfigError(
                    f"trainer.groups: '{name}' and '{other_name}' are one parameter of "
                    "Megatron-core, and must have the same rate and decay"
                )
        members.setdefault(rule, []).append(parameter.tensor)
    return [
        {
            "params": members[rule],
            LR_SCALE: rule.lr_scale,
            "weight_decay": rule.weight_decay,
            "is_expert_parallel": is_expert,
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": cfg.lr,
            "min_lr": cfg.lr,
        }
        for rule in members
    ]


def _allocate(part: Any) -> None:
    """Allocate the optimizer's state, so that a checkpoint is loaded before a step.

    Without transformer-engine it is torch's. On a GPU that takes one kernel, as FSDP2's does.
    """
    if part.init_state_fn is not None:
        part.init_state_fn(part.optimizer, part.config)
    if isinstance(part.optimizer, torch.optim.AdamW):
        for group in part.optimizer.param_groups:
            group["fused"] = all(one.is_cuda for one in group["params"])
        for master, moments in part.optimizer.state.items():
            device = master.device if master.is_cuda else None
            moments.setdefault("step", torch.zeros((), dtype=torch.float32, device=device))
