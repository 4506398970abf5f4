"""Weights of other libraries in and out (Hugging Face, PEFT), and configurations of other systems in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.utils.public_names import public_names

if TYPE_CHECKING:
    from jaxpar.interop import configurations as configurations
    from jaxpar.interop import huggingface as huggingface
    from jaxpar.interop import peft as peft
else:
    __getattr__, __dir__, __all__ = public_names(__name__, __file__)
