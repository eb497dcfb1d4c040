"""DeepSpeed's PipelineModule: two processes over gloo, 1F1B; what it prints goes to its log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from contestant import Contestant
from models import Batch, Case, IterationBlock, IterativeNetwork


def build(case: Case, dropout: float) -> Contestant:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo", verbose=False)
    model = case.model(dropout)
    module = PipelineModule(
        layers=_layers(model),
        num_stages=2,
        loss_fn=case.loss,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    if isinstance(model, IterativeNetwork):  # it builds tied layers itself, with other weights
        module.tied_modules["block"].load_state_dict(model.iter_block.state_dict())
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(parameters, lr=case.rate),
        model_parameters=parameters,
        config={
            "train_micro_batch_size_per_gpu": case.rows,
            "gradient_accumulation_steps": case.num_microbatches,
            "gradient_clipping": 0.0,  # it clips at 1 by default
            "steps_per_print": 1_000_000_000,
        },
    )
    batches: Iterator[Batch] = cycle(case.microbatches())

    def step() -> Tensor:
        loss: Tensor = engine.train_batch(batches)
        return loss

    return Contestant(step)


def _layers(model: nn.Module) -> list[Any]:
    if isinstance(model, nn.Sequential):
        return list(model)
    from deepspeed.pipe import TiedLayerSpec

    assert isinstance(model, IterativeNetwork)
    width = model.iter_block.lin.in_features
    weights = ["lin.weight", "lin.bias"]
    blocks = [
        TiedLayerSpec("block", IterationBlock, width, tied_weight_attr=weights)
        for _ in range(model.num_iterations)
    ]
    return [*blocks, model.output_proj]
