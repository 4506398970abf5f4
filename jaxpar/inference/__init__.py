"""Token generation: the generator, its key/value cache, sampling, and pipelined decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.utils.public_names import public_names

if TYPE_CHECKING:
    from jaxpar.inference.cached_model import DecoderFns as DecoderFns
    from jaxpar.inference.kv_cache import cached_attention as cached_attention
    from jaxpar.inference.kv_cache import fill_cache as fill_cache
    from jaxpar.inference.kv_cache import init_cache as init_cache
    from jaxpar.inference.sampling import Sampling as Sampling
    from jaxpar.parallel.precision.int8 import Int8 as Int8
else:
    __getattr__, __dir__, __all__ = public_names(__name__, __file__)
