"""Example models in Flax: Llama and its relatives, mixtures of experts, a U-Net, and a Vision Transformer in Linen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.utils.public_names import public_names

if TYPE_CHECKING:
    from jaxpar.models.llama.config import LlamaConfig as LlamaConfig
    from jaxpar.models.llama.config import preset as preset
    from jaxpar.models.llama.decode import cached_llama as cached_llama
    from jaxpar.models.llama.model import Llama as Llama
    from jaxpar.models.llama.model import make_llama as make_llama
    from jaxpar.models.llama.pipeline import staged_next_token_loss as staged_next_token_loss
    from jaxpar.models.losses import cross_entropy as cross_entropy
    from jaxpar.models.losses import next_token_loss as next_token_loss
    from jaxpar.models.moe.model import make_decoder as make_decoder
    from jaxpar.models.unet import UNet as UNet
    from jaxpar.models.unet import UNetConfig as UNetConfig
    from jaxpar.models.unet import make_unet as make_unet
    from jaxpar.models.unet import segmentation_loss as segmentation_loss
    from jaxpar.models.vit import ViTConfig as ViTConfig
    from jaxpar.models.vit import classification_loss as classification_loss
    from jaxpar.models.vit import init_vit as init_vit
    from jaxpar.models.vit import make_vit as make_vit
    from jaxpar.models.vit import vit_loss as vit_loss
    from jaxpar.planning.layers.remat import remat_layers as remat_layers
else:
    __getattr__, __dir__, __all__ = public_names(__name__, __file__)
