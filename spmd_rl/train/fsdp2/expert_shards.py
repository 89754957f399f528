"""ExpertShards: the experts of a rank of FSDP2 where several ranks share them (axis ep)."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.moe.deep_ep_buffer import check_deep_ep
from spmd_rl.kernels.moe.deep_ep_dispatcher import DeepEpDispatcher
from spmd_rl.kernels.moe.dispatcher import EpDispatcher
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.layers.split_experts import SplitExperts
from spmd_rl.model.network import CausalLM
from spmd_rl.train.config import EpDispatcherKind


class ExpertShards:
    """The ranks among which experts are split, and those that shard this rank's.

    The ranks along `edp` have the same experts, and shard them. Gradients of experts stay float32
    until they are summed over all ranks, so these weights are gathered in float32.
    """

    def __init__(self, context: RoleContext, kind: EpDispatcherKind) -> None:
        """Raises: ConfigError where a dispatcher of this kind cannot run."""
        self._new_dispatcher = _dispatcher_class(kind, context)
        self.group = context.axis_group(("ep",))
        self.mesh = context.axis_mesh(("edp",))
        self.num_shards, self.shard = self.mesh.size(), self.mesh.get_local_rank()
        self.modules: list[SplitExperts] = []

    def split(self, model: CausalLM) -> None:
        """Have the mixtures of a model keep the experts of this rank."""
        dispatchers: dict[int, EpDispatcher] = {}  # by number of experts; layers share them
        for layer in [one for one in model.modules() if isinstance(one, MoeMlp)]:
            if layer.num_experts not in dispatchers:
                made = self._new_dispatcher(self.group, layer.num_experts)
                dispatchers[layer.num_experts] = made
            layer.split(self.group, dispatchers[layer.num_experts])
            assert isinstance(layer.experts, SplitExperts)
            self.modules.append(layer.experts)


def _dispatcher_class(kind: EpDispatcherKind, context: RoleContext) -> type[EpDispatcher]:
    ep, of_host = context.axis_group(("ep",)).size(), context.world.local_size
    if kind == "torch" or ep == 1:
        return EpDispatcher
    check_deep_ep(ep)
    if of_host % ep:
        raise ConfigError(
            f'trainer.backend.ep_dispatcher = "deep_ep" is for ranks of one host: {of_host} ranks '
            f"of this one cannot be parted by {ep}"
        )
    return DeepEpDispatcher
