"""What a survey makes of models as people use them, with few and narrow layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stageline.capturing.survey import survey, survey_structure

transformers = pytest.importorskip("transformers")

LAYERS = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TEXT = {"vocab_size": 32, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"image_size": 16, "patch_size": 4}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 3, "n_head": 2, **TEXT}),
    "T5": (
        "T5ForConditionalGeneration",
        {
            **{"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 6},
            **{"num_heads": 2, "decoder_start_token_id": 0},
        },
    ),
    "Swin": (
        "SwinForImageClassification",
        {
            **{"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2]},
            **{"num_heads": [2, 2], "window_size": 2},
        },
    ),
    "Albert": ("AlbertForMaskedLM", {"embedding_size": 8, **LAYERS, **TEXT}),
    "Mixtral": (
        "MixtralForCausalLM",
        {"num_key_value_heads": 1, "num_local_experts": 2, **LAYERS, **TEXT},
    ),
    "CLIP": (
        "CLIPModel",
        {
            "text_config": {**LAYERS, **TEXT},
            "vision_config": {**LAYERS, **IMAGE},
            "projection_dim": 8,
        },
    ),
}


def layers(name: str, number: int) -> list[str]:
    return [f"{name}.{index}" for index in range(number)]


EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "GPT2": (["transformer"], layers("transformer.h", 3)),
    "T5": (["decoder", "encoder"], [*layers("encoder.block", 6), *layers("decoder.block", 6)]),
    "Swin": (
        ["swin", "swin.encoder", "swin.encoder.layers.1"],
        ["swin.encoder.layers.0", *layers("swin.encoder.layers.1.blocks", 2)],
    ),
    "Albert": (["albert", "albert.encoder"], ["albert.encoder.albert_layer_groups.0"]),
    "Mixtral": (["model"], layers("model.layers", 3)),
    "CLIP": (
        ["text_model", "text_model.encoder", "vision_model", "vision_model.encoder"],
        [*layers("vision_model.encoder.layers", 3), *layers("text_model.encoder.layers", 3)],
    ),
}


def made(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    kind, options = MODELS[name]
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options))
    tokens = torch.arange(3, 27).view(2, 12)
    arguments: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if name == "Swin":
        arguments = {"labels": torch.tensor([0, 1])}
    if name == "CLIP":
        arguments.pop("labels")
    if name in ("Swin", "CLIP"):
        arguments["pixel_values"] = torch.randn(2, 3, 16, 16)
    return model, arguments


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_known_models_are_found(name: str) -> None:
    model, arguments = made(name)
    opened, members = EXPECTED[name]
    for mode in (True, False):
        choice = survey(model.train(mode), (), arguments).choose(3)
        assert (sorted(choice.opened), list(choice.members)) == (["", *opened], members)
    if name != "Albert":  # how often its one layer is called is not to be seen in its structure
        choice = survey_structure(model).choose(3)
        assert sorted(choice.opened) == ["", *opened]
        assert sorted(choice.members) == sorted(members)


def test_checkpointed_layers_are_members_and_stay_closed() -> None:
    model: Any = made("Swin")[0]
    model.gradient_checkpointing_enable()
    found = survey(model.train(), (), made("Swin")[1])
    assert list(found.choose(2).members) == layers("swin.encoder.layers", 2)
    closed = [visit.path for visit in found.visits if visit.is_checkpointed]
    assert closed[0] == "swin.encoder.layers.0"
