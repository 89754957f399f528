"""Routes that SGLang returns with the last message of a request, for all rows that it computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from msgspec.structs import asdict
from numpy.typing import NDArray

from spmd_rl.errors import SpmdError
from spmd_rl.kernels.moe.route_hash import ROUTES, RouteHash
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.sglang.structs import TensorMessage
from spmd_rl.types.routes import EXPERT_IDS, RouteIds
from spmd_rl.types.token_data import TokenData


@dataclass(frozen=True)
class ReturnedRoutes:
    """`rows` are the routes of a request's rows from the one at `first` on, over `num_layers`.

    With `is_drawn`, they are of the steps that drew its tokens. A request that was retracted has
    those of a later prefill.
    Shape: rows [T, W].
    """

    rows: RouteIds
    first: int
    is_drawn: bool
    num_layers: int

    def of_tokens(self, start: int, stop: int) -> RouteIds:
        """Return the routes of the tokens at these places, each of the row before it.

        Tokens whose rows were not returned have zeros. Shape: [stop - start, W].
        """
        found = np.zeros((stop - start, self.rows.shape[1]), self.rows.dtype)
        places = np.arange(start, stop) - 1 - self.first
        known = (places >= 0) & (places < len(self.rows))
        found[known] = self.rows[places[known]]
        return found

    def added_to(self, past: TokenData, new: TokenData, num_prompt: int) -> TokenData:
        """Return `past` and then `new`, whose tokens get their routes, and so does the prompt if it
        has none.
        """
        if self.is_drawn:
            start = num_prompt + len(past)
            routes = self.of_tokens(start, start + len(new))
            columns = new.columns | {EXPERT_IDS: routes, ROUTES: self._hashes(routes)}
            new = TokenData(new.tokens, new.logprobs, new.versions, new.kept, columns)
        joined = TokenData.join([past, new])
        if joined.prompt_routes or self.first:
            return joined
        given = asdict(joined)
        return TokenData(**given | {"prompt_routes": self.of_tokens(0, num_prompt).tobytes()})

    def _hashes(self, routes: RouteIds) -> NDArray[np.int32]:
        """Return the hashes of routes, as the native engine has them; 0 where there are none."""
        found, hashed = torch.from_numpy(routes.astype(np.int64)), RouteHash()
        for ids in found.chunk(self.num_layers, 1):
            hashed.add(ids)
        values = hashed.of_rows(torch.arange(len(found)))
        assert values is not None
        hashes: NDArray[np.int32] = values.numpy() * routes.any(1)
        return hashes


def decoded(spec: ModelSpec, shape: RouteShape, message: TensorMessage) -> RouteIds:
    """Return the routes of the mixtures, each in ascending order. Shape: [T, W].

    SGLang's are int32 [T, layers, K], for layers that are none too, in the order of the weights.
    Raises: SpmdError for others.
    """
    sizes, dtype, data = message
    expected = [spec.num_layers, shape.num_chosen]
    if dtype != "int32" or list(sizes[1:]) != expected:
        raise SpmdError(
            f"SGLang returned routes that are {dtype} {list(sizes)}: expected int32 of "
            f"{expected} for each token"
        )
    routes: NDArray[np.int32] = np.frombuffer(data, np.int32).reshape(sizes)
    layers = [number for number, block in enumerate(spec.blocks) if isinstance(block.mlp, Moe)]
    chosen = np.sort(routes[:, layers], axis=2).reshape(len(routes), -1)
    return cast(RouteIds, chosen.astype(shape.dtype))
