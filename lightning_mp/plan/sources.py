"""Subjects by the name of a model, from installed libraries; nothing is downloaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.plan.subject import PRECISIONS, Subject
from lightning_mp.plan.tower_bytes import blank, measure_towers

__all__ = ["CLIP_SIZES", "subject_of_model"]

# Vision (width, layers, heads, patch), text (width, layers, heads), projection; the width of an MLP
# is four times that of its layer. CLIP, https://arxiv.org/abs/2103.00020, Table 20.
CLIP_SIZES = {
    "ViT-B/32": ((768, 12, 12, 32), (512, 12, 8), 512),
    "ViT-B/16": ((768, 12, 12, 16), (512, 12, 8), 512),
    "ViT-L/14": ((1024, 24, 16, 14), (768, 12, 12), 768),
}
_ENCODER = "hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size"
# Model, names of its methods for images and texts, image size, tokens of a text.
_Built = tuple[nn.Module, tuple[str, str], int, int]


def subject_of_model(name: str, precision: str) -> Subject:
    """Make a model from its configuration, on tensors without memory, and measure it.

    Args:
        name: One of `CLIP_SIZES`, a model of open_clip such as `ViT-B-32`, a class of transformers
            such as `SiglipModel` with its default configuration, or a folder with a config.json.
        precision: A key of `PRECISIONS`.

    Raises:
        ValueError: No installed library has a model of this name, or it cannot be measured.
    """
    build, static = _builder(name), PRECISIONS[precision]
    with FakeTensorMode():
        model, names, size, tokens = build(name)
        blank(model, static.weights_dtype)
        image, text = (find_tower(model, tower) for tower in names)

        def step(pairs: int) -> None:
            getattr(model, names[0])(torch.empty(pairs, 3, size, size))
            getattr(model, names[1])(torch.zeros(pairs, tokens, dtype=torch.int64))

        try:
            measured = measure_towers(model, (image, text), step, static)
        except DataDependentOutputException as error:
            raise ValueError(
                f"Passed `--model {name}`, whose forward reads values, but `plan` runs it on "
                "tensors without memory. Pass the YAML file of your own run by `--config`, whose "
                "batches have values."
            ) from error
    return Subject.of(
        model,
        [torch.optim.AdamW(model.parameters())],
        name=name,
        towers=measured,
        # Augmented images in fp32, and int64 tokens.
        pair_bytes=3 * size * size * 4 + tokens * 8,
        precision=precision,
        found="from its configuration, on tensors without memory",
    )


def _builder(name: str) -> Callable[[str], _Built]:
    has_transformers = importlib.util.find_spec("transformers") is not None
    has_open_clip = importlib.util.find_spec("open_clip") is not None
    if has_open_clip:
        import open_clip  # type: ignore[import-not-found]

        if open_clip.get_model_config(name) is not None:
            return _of_open_clip
    if has_transformers:
        import transformers

        is_class = getattr(getattr(transformers, name, None), "config_class", None) is not None
        if name in CLIP_SIZES or is_class or "/" in name or os.path.isdir(name):
            return _of_transformers
    raise ValueError(
        f"Passed `--model {name}`. It must be one of {', '.join(CLIP_SIZES)}, a class of "
        "transformers such as `SiglipModel`, a folder with its config.json, or a model name of "
        f"open_clip. transformers is{'' if has_transformers else ' not'} installed, open_clip "
        f"is{'' if has_open_clip else ' not'}. Pass the YAML file of your own run by `--config`."
    )


def _of_open_clip(name: str) -> _Built:
    import open_clip

    config = open_clip.get_model_config(name)
    # open_clip moves the model to a device, which fake tensors refuse.
    with unset_fake_temporarily(), torch.device("meta"):
        model = open_clip.create_model(name, pretrained=None, device="meta")
    size, tokens = config["vision_cfg"]["image_size"], config["text_cfg"]["context_length"]
    return model, ("encode_image", "encode_text"), size, tokens


def _of_transformers(name: str) -> _Built:
    import transformers

    if name in CLIP_SIZES:
        make, config = transformers.CLIPModel, _clip_config(name)
    elif hasattr(transformers, name):
        make = getattr(transformers, name)
        config = make.config_class()
    else:
        make = transformers.AutoModel.from_config
        try:
            # Otherwise transformers would query the hub.
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        except OSError as error:
            if os.path.exists(name):  # its config.json cannot be read
                raise
            raise ValueError(
                f"Passed `--model {name}`, whose configuration is not on this machine, and `plan` "
                "downloads nothing. Pass a folder with its config.json, or a name of "
                f"{', '.join(CLIP_SIZES)}."
            ) from error
    # `Siglip2Model` has images of any size.
    size: Any = getattr(getattr(config, "vision_config", None), "image_size", None)
    model: Any = None
    if size is not None and hasattr(config, "text_config"):
        with _without_initial_values():
            model = make(config)
    names = "get_image_features", "get_text_features"
    if not all(hasattr(model, each) for each in names):
        raise ValueError(
            f"Passed `--model {name}`. `plan` needs a tower for images of a fixed size and one for "
            f"texts, which {type(config).__name__} does not describe. Pass a model with both, such "
            "as `CLIPModel` or `SiglipModel`, or the YAML file of your own run by `--config`."
        )
    return model, names, size, config.text_config.max_position_embeddings


def _clip_config(name: str) -> Any:
    from transformers import CLIPConfig

    vision_sizes, text_sizes, projection = CLIP_SIZES[name]
    # The paper's code uses GELU; CLIP's own quick GELU saves one value more per activation.
    vision, text = (
        {**dict(zip(_ENCODER, sizes, strict=False)), "intermediate_size": 4 * sizes[0]}
        | {"hidden_act": "gelu"}
        for sizes in (vision_sizes, text_sizes)
    )
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection)


def _without_initial_values() -> AbstractContextManager[Any]:
    """Keep transformers from drawing weights, because some initializers read what they drew."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    context: AbstractContextManager[Any] = no_init_weights()
    return context
