"""More models over images and sound; see further.py."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.models import inputs as make
from tests.models.inputs import PAD, VOCABULARY
from tests.models.zoo import IMAGE_TOWER, SWIN, TEXT_TOWER, VIT, Entry, entry, image

WAVES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (10, 8),
    "conv_kernel": (12, 9),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "pad_token_id": PAD,
    "inputs": make.waveform,
}

# Five times halved, an image of 32 x 32 has one pixel left: too few for BatchNorm and one row.
LARGE = partial(make.image, scale=4)

# Three stages of convolutions, each with twice the channels of the one before.
WIDENING: dict[str, Any] = {
    "depths": [1, 2, 1],
    "hidden_sizes": [8, 16, 32],
    "other_length": 24,
}
RESIDUAL: dict[str, Any] = WIDENING | {"embedding_size": 8}

MOBILE: dict[str, Any] = {
    "image_size": 32,
    "depth_multiplier": 0.25,
    "inputs": LARGE,
    "other_length": 24,
}

CONVOLUTIONS: tuple[Entry, ...] = (
    image("ConvNeXt", "ConvNextForImageClassification", num_stages=3, **WIDENING),
    image("ConvNeXt-V2", "ConvNextV2ForImageClassification", num_stages=3, **WIDENING),
    image("ResNet", "ResNetForImageClassification", layer_type="basic", **RESIDUAL),
    image("RegNet", "RegNetForImageClassification", groups_width=4, **RESIDUAL),
    image(
        "EfficientNet",
        "EfficientNetForImageClassification",
        image_size=64,
        inputs=LARGE,
        width_coefficient=0.25,
        depth_coefficient=0.5,
        hidden_dim=320,
        other_length=24,
    ),
    image("MobileNetV1", "MobileNetV1ForImageClassification", **MOBILE),
    image("MobileNetV2", "MobileNetV2ForImageClassification", **MOBILE),
    image(
        "MobileViT",
        "MobileViTForImageClassification",
        image_size=64,
        inputs=LARGE,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 8, 16, 24, 32, 32],
        patch_size=2,
    ),
    image("BiT", "BitForImageClassification", num_groups=4, **RESIDUAL),
    image(
        "PoolFormer",
        "PoolFormerForImageClassification",
        depths=[1, 1, 2],
        hidden_sizes=[8, 16, 32],
        num_encoder_blocks=3,
        patch_sizes=[3, 3, 3],
        strides=[2, 2, 2],
        padding=[1, 1, 1],
        other_length=24,
    ),
)

VISION: tuple[Entry, ...] = (
    image("DeiT", "DeiTForImageClassification", **VIT),
    image("BEiT", "BeitForImageClassification", **VIT),
    image("Data2Vec-Vision", "Data2VecVisionForImageClassification", **VIT),
    image("DINOv2", "Dinov2ForImageClassification", **VIT),
    image(
        "ViT-MAE",
        "ViTMAEForPreTraining",
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        inputs=make.images_only,
        **VIT,
    ),
    image(
        "SegFormer",
        "SegformerForImageClassification",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        sr_ratios=[4, 2, 1, 1],
        other_length=24,
    ),
    image("Swin-V2", "Swinv2ForImageClassification", **SWIN),
    image("Donut-Swin", "DonutSwinModel", inputs=make.images_only, computes_loss=False, **SWIN),
    image(
        "CvT",
        "CvtForImageClassification",
        embed_dim=[8, 16, 32],
        num_heads=[1, 2, 4],
        depth=[1, 2, 4],
        inputs=LARGE,
        other_length=24,
    ),
    image(
        "LeViT",
        "LevitForImageClassification",
        image_size=32,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        key_dim=[8, 8, 8],
        depths=[1, 1, 1],
        patch_size=16,
    ),
    image(
        "PVT",
        "PvtForImageClassification",
        image_size=32,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        sequence_reduction_ratios=[4, 2, 1, 1],
    ),
    image(
        "FocalNet",
        "FocalNetForImageClassification",
        image_size=32,
        embed_dim=8,
        hidden_sizes=[8, 16, 32],
        depths=[1, 1, 2],
        focal_levels=[1, 1, 1],
        focal_windows=[3, 3, 3],
    ),
    entry(
        "SigLIP",
        "SiglipModel",
        inputs=make.images_and_text,
        other_length=None,
        text_config=TEXT_TOWER | {"max_position_embeddings": 16},
        vision_config=IMAGE_TOWER,
    ),
    entry(
        "ViLT",
        "ViltModel",
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        inputs=make.images_and_text_only,
        computes_loss=False,
        **VIT,
    ),
)

SOUND: tuple[Entry, ...] = (
    entry("Wav2Vec2", "Wav2Vec2ForSequenceClassification", **WAVES),
    entry("HuBERT", "HubertForSequenceClassification", **WAVES),
    entry("WavLM", "WavLMForSequenceClassification", **WAVES),
    entry(
        "Data2Vec-Audio", "Data2VecAudioForSequenceClassification", conv_pos_kernel_size=5, **WAVES
    ),
    entry(
        "AST",
        "ASTForAudioClassification",
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        patch_size=4,
        max_length=32,
        num_mel_bins=16,
        frequency_stride=4,
        time_stride=4,
        masks=False,
        other_length=None,
        inputs=partial(make.fixed_audio, frames=32, mels=16),
    ),
    entry(
        "TimeSeries",
        "TimeSeriesTransformerForPrediction",
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=1,
        d_model=16,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        masks=False,
        other_length=None,
        inputs=make.time_series,
    ),
)
