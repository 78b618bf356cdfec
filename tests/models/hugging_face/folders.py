"""Folders of transformers with tiny networks of random weights."""

from pathlib import Path

import torch
from transformers import (
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SegformerImageProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    YolosConfig,
    YolosForObjectDetection,
    YolosImageProcessor,
)

_SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "patch_size": 8,
}
NAMES = {0: "cat", 1: "dog", 2: "eel"}


def write_vit(folder: Path) -> Path:
    config = ViTConfig(image_size=32, id2label=NAMES, **_SMALL)
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    return _written(folder, ViTForImageClassification, config, processor)


def write_yolos(folder: Path) -> Path:
    config = YolosConfig(image_size=[32, 48], num_detection_tokens=5, id2label=NAMES, **_SMALL)
    processor = YolosImageProcessor(size={"shortest_edge": 32, "longest_edge": 64})
    return _written(folder, YolosForObjectDetection, config, processor)


def write_segformer(folder: Path) -> Path:
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 8],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 1],
        mlp_ratios=[1, 1],
        decoder_hidden_size=8,
        id2label=NAMES,
    )
    processor = SegformerImageProcessor(size={"height": 32, "width": 32})
    return _written(folder, SegformerForSemanticSegmentation, config, processor)


def _written(folder: Path, kind, config, processor) -> Path:
    network = kind(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
