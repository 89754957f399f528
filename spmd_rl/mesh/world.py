"""World: the ranks that torchrun started, and how they join torch.distributed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.private_folder import meeting_folder
from spmd_rl.mesh.shared_gpus import gpu_of, variables_of_sharing
from spmd_rl.mkl import warm_up_functions
from spmd_rl.observe.provenance import num_processors

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

JOIN_TIMEOUT = timedelta(minutes=5)
# The deadline of the controller's call comes first: torch would end the ranks that wait.
COLLECTIVE_TIMEOUT = timedelta(days=7)
FLIGHT_RECORDER_ENV = "TORCH_FR_BUFFER_SIZE"  # how many collectives torch records


@dataclass(frozen=True)
class World:
    """This process's rank in the world, from torchrun's variables. `run_id` and `restart` together
    name one start of the ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    run_id: str
    restart: int

    @staticmethod
    def is_around() -> bool:
        """Return whether torchrun started this process."""
        return {"RANK", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()

    @classmethod
    def from_env(cls) -> World:
        """Read torchrun's variables.

        Raises: ConfigError when the process was not started by torchrun.
        """
        if not cls.is_around():
            raise ConfigError(
                "not inside a torchrun world: start with `spmd-rl run RECIPE` "
                "or `torchrun --nproc-per-node N -m spmd_rl run RECIPE`"
            )
        return cls(
            rank=int(os.environ["RANK"]),
            size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            node=int(os.environ.get("GROUP_RANK", "0")),
            run_id=os.environ.get("TORCHELASTIC_RUN_ID", "none"),
            restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    def has_one_host(self, ranks: Sequence[int]) -> bool:
        """Return whether all of these ranks are on one host."""
        return len({rank // self.local_size for rank in ranks}) == 1

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.local_size)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def own_device(self) -> torch.device:
        """The device of this rank. Raises: ConfigError where the ranks of its host are too many."""
        import torch

        if self.device == "cpu":
            return torch.device("cpu")
        num_gpus = torch.cuda.device_count()
        return torch.device("cuda", gpu_of(self.local_rank, self.local_size, num_gpus))


def open_store(world: World) -> Store:
    """Open the key-value store in which the ranks of this start find each other.

    On one node it is a file that only this user can reach. On several nodes it is torchrun's own
    store. Any process that reaches its port can read and write it, so nothing in it is secret or
    trusted.

    torchrun may keep one store for all starts of the ranks, with the keys of earlier starts in it.
    Its count of starts tells them apart, but only on the node where a rank failed: the agents of
    other nodes do not count that start.

    Blocks: until the store answers; raises after `JOIN_TIMEOUT`.
    Raises: ConfigError when ranks of several nodes could meet in a store with old keys.
    """
    from torch._C._distributed_c10d import FileStore, PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if world.num_nodes == 1:
        file = FileStore(str(meeting_folder().path / "store"))
        file.set_timeout(JOIN_TIMEOUT)
        return file
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise ConfigError(
            f"torchrun --max-restarts on {world.num_nodes} nodes "
            "needs a fresh store for every start: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
            "on each node before torchrun, as launch/slurm.sbatch does"
        )
    store, _, _ = next(rendezvous("env://", timeout=JOIN_TIMEOUT))
    return PrefixStore(f"spmd_rl/{world.restart}", store) if is_shared else store


def join(world: World, store: Store) -> None:
    """Initialise torch.distributed: gloo for host tensors, and NCCL too on GPUs. Ranks of a host
    share its processors, unless OMP_NUM_THREADS says otherwise.

    torch records the last collectives of both; controller/lifecycle/stacks.py saves that record
    when one of them hangs.
    Ranks: all.
    Blocks: until every rank has joined; the deadline of the run's first call ends it.
    """
    os.environ.setdefault(FLIGHT_RECORDER_ENV, "2000")
    if world.num_nodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else's network
    import torch
    import torch.distributed as dist

    on_gpu, device_id = world.device == "cuda", None
    if on_gpu:
        device_id = world.own_device
        _prepare_sharing(world)
        torch.cuda.set_device(device_id)
    if "OMP_NUM_THREADS" not in os.environ:
        share = max(1, num_processors() // world.local_size)
        default = torch.get_num_threads()
        torch.set_num_threads(min(share, default) if on_gpu else share)
    warm_up_functions()
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device_id,
    )


def _prepare_sharing(world: World) -> None:
    """Let ranks share the GPUs of this host, where it has fewer of them than ranks."""
    import torch

    num_gpus = torch.cuda.device_count()
    if world.local_size > num_gpus:
        host, is_only_host = f"{world.run_id} {world.node}", world.num_nodes == 1
        variables = variables_of_sharing(host, world.local_rank, num_gpus, is_only_host)
        for name, value in variables.items():
            os.environ.setdefault(name, value)
