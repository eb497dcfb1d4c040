"""Models of the transformers library as their constructors make them, only small.

Settings not named here keep the library's defaults: sdpa attention, caches, dropout. Weights are
random with a fixed seed; nothing is downloaded. The library is imported when the first model is
built, so that collecting tests does not wait for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.models import inputs as make
from tests.models.inputs import PAD, VOCABULARY, Maker

SEED = 7
FIELDS = ("inputs", "masks", "other_length", "pads", "computes_loss")


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        name: What people call it.
        model: Its class in transformers.
        settings: Of its configuration.
        inputs: Makes inputs of a shape.
        masks: Whether it takes an attention mask.
        other_length: Another length it can take; None if it has one size only.
        pads: The side its rows are padded on.
        computes_loss: Whether it returns a loss, given labels.
    """

    name: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Maker = make.language_model
    masks: bool = True
    other_length: int | None = 12
    pads: str = "right"
    computes_loss: bool = True

    def build(self, *, dropout: bool = True) -> nn.Module:
        """Return the model in train mode; with ``dropout=False`` nothing in it is random."""
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # the library's own use of what torch deprecates
            import transformers

            # Nobody reads advice about tiny random models.
            transformers.logging.set_verbosity_error()
            model_class = getattr(transformers, self.model)
            config = model_class.config_class(**self.settings)
            if not dropout:
                _without_randomness(config)
            torch.manual_seed(SEED)
            model: nn.Module = model_class(config)
        return model.train()


def _without_randomness(config: Any) -> None:
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _without_randomness(value)
        elif isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
            setattr(config, name, 0.0)


def entry(name: str, model: str, **settings: Any) -> Entry:
    """Return an entry whose fields are told from settings of the configuration by name."""
    own = {name: settings.pop(name) for name in FIELDS if name in settings}
    return Entry(name, model, settings, **own)


def text(name: str, model: str, **settings: Any) -> Entry:
    """Return an entry for a model over tokens, with the settings most of them share."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return entry(name, model, **(common | settings))


def encoder_decoder(name: str, model: str, **settings: Any) -> Entry:
    """Return an entry for a model in the manner of BART."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "inputs": make.sequence_to_sequence,
    }
    return entry(name, model, **(common | settings))


def t5(name: str, model: str, **settings: Any) -> Entry:
    """Return an entry for a model in the manner of T5."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 3,
        "num_heads": 4,
        "pad_token_id": PAD,
        "decoder_start_token_id": 0,
        "inputs": make.sequence_to_sequence,
    }
    return entry(name, model, **(common | settings))


def image(name: str, model: str, **settings: Any) -> Entry:
    """Return an entry for a model over images of one size."""
    return entry(
        name, model, **({"inputs": make.image, "masks": False, "other_length": None} | settings)
    )


# 32 x 32 pixels in patches of 8.
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}

SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}

# The two halves of models over images and text.
IMAGE_TOWER: dict[str, Any] = VIT | {"num_hidden_layers": 3}
TEXT_TOWER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}

TWENTY: tuple[Entry, ...] = (
    text("BERT", "BertForSequenceClassification", inputs=make.classifier),
    entry(
        "DistilBERT",
        "DistilBertForMaskedLM",
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=64,
        n_layers=4,
        n_heads=4,
        max_position_embeddings=64,
        pad_token_id=PAD,
    ),
    text("RoBERTa", "RobertaForMaskedLM"),
    entry(
        "GPT-2",
        "GPT2LMHeadModel",
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=2,
        pads="left",
    ),
    text("GPT-NeoX", "GPTNeoXForCausalLM"),
    text("OPT", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32, pads="left"),
    entry(
        "Bloom",
        "BloomForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=4,
        n_head=4,
        pad_token_id=PAD,
        pads="left",
    ),
    text("Llama", "LlamaForCausalLM", num_key_value_heads=2, pads="left"),
    text("Mistral", "MistralForCausalLM", num_key_value_heads=2, sliding_window=8, pads="left"),
    text("Qwen2", "Qwen2ForCausalLM", num_key_value_heads=2),
    text("Qwen3", "Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8),
    text(
        "Gemma2",
        "Gemma2ForCausalLM",
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        pads="left",
    ),
    text("Phi-3", "Phi3ForCausalLM", num_key_value_heads=2),
    text("Mixtral", "MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4),
    t5("T5", "T5ForConditionalGeneration"),
    encoder_decoder("BART", "BartForConditionalGeneration"),
    image("ViT", "ViTForImageClassification", **VIT),
    image("Swin", "SwinForImageClassification", **SWIN),
    entry(
        "CLIP",
        "CLIPModel",
        text_config=TEXT_TOWER | {"max_position_embeddings": 64, "eos_token_id": 2},
        vision_config=IMAGE_TOWER,
        projection_dim=16,
        inputs=make.images_and_text,
    ),
    encoder_decoder(
        "Whisper",
        "WhisperForConditionalGeneration",
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=32,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        inputs=partial(make.spectrogram, mels=16),
        masks=False,
    ),
)
