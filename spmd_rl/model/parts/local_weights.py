"""Weights of an engine's model on this rank, by their names and boxes, as a push sees them."""

from __future__ import annotations

from spmd_rl.model.lora import is_adapter
from spmd_rl.model.network import CausalLM
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors


def local_weights(model: CausalLM, pushed: bool) -> LocalTensors:
    """Return the weights that pushes replace, or those that they do not: beside adapters, the base.

    Of a part of the model, each has its box.
    """
    has_adapters = model.lora.rank > 0
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if (not has_adapters or is_adapter(name)) == pushed
    }
    if model.part.count == 1:
        return LocalTensors.whole(parameters)
    boxes, shapes = model.part.boxes(model.spec), model.spec.parameter_shapes()
    return LocalTensors(
        {name: LocalTensor(shapes[name], boxes[name], one) for name, one in parameters.items()}
    )
