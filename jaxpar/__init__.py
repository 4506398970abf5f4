"""jaxpar: explained and proven parallelism for Flax models.

The names that most programs need stand here; the others are in the modules ``pipeline``, ``context``, ``offload``,
``overlap``, ``moe``, ``lora``, ``compression``, ``optimizers``, ``spatial``, ``tensor``, ``parameter_server``,
``inference``, ``interop``, ``analysis``, ``models``, ``data``, ``nnx``, ``linen``, ``testing`` and ``errors``. All load
on first use, so ``import jaxpar`` imports no jax. If jax is already loaded, it creates jaxpar's jax contexts, so that
none is created while jax traces (:mod:`jaxpar.utils.contexts`).

>>> import jaxpar as jp
>>> jp.MeshSpec(data=-1, model=2).sizes(8)["data"]
4
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from jaxpar.utils.public_names import public_names

__version__ = "0.1.0"


def _create_contexts() -> None:
    if "jax" in sys.modules:
        importlib.import_module("jaxpar.utils.contexts")


if TYPE_CHECKING:
    from jaxpar import analysis as analysis
    from jaxpar import compression as compression
    from jaxpar import context as context
    from jaxpar import data as data
    from jaxpar import errors as errors
    from jaxpar import inference as inference
    from jaxpar import interop as interop
    from jaxpar import linen as linen
    from jaxpar import lora as lora
    from jaxpar import models as models
    from jaxpar import moe as moe
    from jaxpar import nnx as nnx
    from jaxpar import offload as offload
    from jaxpar import optimizers as optimizers
    from jaxpar import overlap as overlap
    from jaxpar import parameter_server as parameter_server
    from jaxpar import pipeline as pipeline
    from jaxpar import spatial as spatial
    from jaxpar import tensor as tensor
    from jaxpar import testing as testing
    from jaxpar.analysis.hlo.audit import audit as audit
    from jaxpar.analysis.layout.explain import check as check
    from jaxpar.analysis.layout.explain import explain as explain
    from jaxpar.analysis.roofline import roofline as roofline
    from jaxpar.checkpoint.manager import CheckpointManager as CheckpointManager
    from jaxpar.checkpoint.restore import restore as restore
    from jaxpar.checkpoint.save import save as save
    from jaxpar.inference.generator import Generator as Generator
    from jaxpar.parallel.attention.attention import attention as attention
    from jaxpar.parallel.attention.mask import Mask as Mask
    from jaxpar.parallel.experts.experts import experts as experts
    from jaxpar.parallel.pipeline.options import Pipeline as Pipeline
    from jaxpar.parallel.precision.policy import Precision as Precision
    from jaxpar.parallel.unsharded import unsharded as unsharded
    from jaxpar.parallel.zero.gather import gather_weight as gather_weight
    from jaxpar.parallel.zero.gather import sharded_dot as sharded_dot
    from jaxpar.parallel.zero.stages import Zero as Zero
    from jaxpar.planning.names.annotate import annotate as annotate
    from jaxpar.planning.parallelize import parallelize as parallelize
    from jaxpar.planning.plan import plan as plan
    from jaxpar.sharding.arrays import shard_array as shard_array
    from jaxpar.sharding.layout import Layout as Layout
    from jaxpar.sharding.layout import constrain as constrain
    from jaxpar.sharding.layout import current_layout as current_layout
    from jaxpar.sharding.layout import hint as hint
    from jaxpar.sharding.mesh import MeshSpec as MeshSpec
    from jaxpar.sharding.rules import Rules as Rules
    from jaxpar.sharding.rules import first_of as first_of
    from jaxpar.sharding.rules import over as over
    from jaxpar.training.model import tag as tag
    from jaxpar.training.one_bit_adam import one_bit_adam as one_bit_adam
    from jaxpar.training.remat import RematPolicy as RematPolicy
    from jaxpar.training.state import TrainState as TrainState
    from jaxpar.training.state import abstract_state as abstract_state
    from jaxpar.training.state import init as init
    from jaxpar.training.step import eval_step as eval_step
    from jaxpar.training.step import train_step as train_step
    from jaxpar.utils.simulate_devices import simulate_devices as simulate_devices
else:
    __getattr__, __dir__, __all__ = public_names(__name__, __file__, loaded=_create_contexts)

_create_contexts()
