"""jaxpar: explained and proven parallelism for Flax models.

The public names load on first use, so that ``import jaxpar`` costs nothing and imports no jax. Where jax is already loaded,
it creates jaxpar's jax contexts, so that none is created later while jax traces (:mod:`jaxpar.utils.contexts`).

>>> import jaxpar as jp
>>> jp.MeshSpec(data=-1, model=2).sizes(8)["data"]
4
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxpar import errors as errors
    from jaxpar import testing as testing
    from jaxpar.analysis.compile.ahead_of_time import compile_for as compile_for
    from jaxpar.analysis.hlo.audit import audit as audit
    from jaxpar.analysis.layout.explain import check as check
    from jaxpar.analysis.layout.explain import explain as explain
    from jaxpar.analysis.roofline import roofline as roofline
    from jaxpar.checkpoint.manager import CheckpointManager as CheckpointManager
    from jaxpar.checkpoint.restore import restore as restore
    from jaxpar.checkpoint.save import save as save
    from jaxpar.inference.cached_model import DecoderFns as DecoderFns
    from jaxpar.inference.generator import Generator as Generator
    from jaxpar.inference.kv_cache import cached_attention as cached_attention
    from jaxpar.inference.sampling import Sampling as Sampling
    from jaxpar.parallel.attention.attention import attention as attention
    from jaxpar.parallel.attention.attention_local import attention_local as attention_local
    from jaxpar.parallel.attention.context import Context as Context
    from jaxpar.parallel.attention.load_balance import balance as balance
    from jaxpar.parallel.attention.mask import Mask as Mask
    from jaxpar.parallel.attention.packing import balanced_packing as balanced_packing
    from jaxpar.parallel.attention.plot import draw_mask as draw_mask
    from jaxpar.parallel.collectives.bucketing import CollectiveFusion as CollectiveFusion
    from jaxpar.parallel.collectives.hierarchical import all_to_all_local as all_to_all_local
    from jaxpar.parallel.offload.host_weights import to_device as to_device
    from jaxpar.parallel.offload.placement import offload as offload
    from jaxpar.parallel.overlap.branches import Branch as Branch
    from jaxpar.parallel.overlap.interleave import interleave_batches as interleave_batches
    from jaxpar.parallel.precision.int8 import Int8 as Int8
    from jaxpar.parallel.precision.policy import Precision as Precision
    from jaxpar.parallel.zero.gather import gather_weight as gather_weight
    from jaxpar.parallel.zero.gather import sharded_dot as sharded_dot
    from jaxpar.parallel.zero.stages import Zero as Zero
    from jaxpar.sharding.arrays import shard_array as shard_array
    from jaxpar.sharding.layout import Layout as Layout
    from jaxpar.sharding.layout import constrain as constrain
    from jaxpar.sharding.layout import current_layout as current_layout
    from jaxpar.sharding.layout import hint as hint
    from jaxpar.sharding.mesh import MeshSpec as MeshSpec
    from jaxpar.sharding.rules import Rules as Rules
    from jaxpar.sharding.rules import first_of as first_of
    from jaxpar.sharding.rules import over as over
    from jaxpar.training.asynchronous.step import PipedreamStep as PipedreamStep
    from jaxpar.training.disk_step import DiskOffloadedStep as DiskOffloadedStep
    from jaxpar.training.model import tag as tag
    from jaxpar.training.one_bit_adam import one_bit_adam as one_bit_adam
    from jaxpar.training.remat import RematPolicy as RematPolicy
    from jaxpar.training.state import TrainState as TrainState
    from jaxpar.training.state import abstract_state as abstract_state
    from jaxpar.training.state import init as init
    from jaxpar.training.step import eval_step as eval_step
    from jaxpar.training.step import train_step as train_step
    from jaxpar.utils.simulate_devices import simulate_devices as simulate_devices

_HOMES = {
    "Asynchronous": "parallel.pipeline.options",
    "PipedreamStep": "training.asynchronous.step",
    "Branch": "parallel.overlap.branches",
    "DecoderFns": "inference.cached_model",
    "CheckpointManager": "checkpoint.manager",
    "Context": "parallel.attention.context",
    "DiskOffloadedStep": "training.disk_step",
    "CollectiveFusion": "parallel.collectives.bucketing",
    "Generator": "inference.generator",
    "Int8": "parallel.precision.int8",
    "Layout": "sharding.layout",
    "Mask": "parallel.attention.mask",
    "MeshSpec": "sharding.mesh",
    "Pipeline": "parallel.pipeline.options",
    "Precision": "parallel.precision.policy",
    "RematPolicy": "training.remat",
    "Rules": "sharding.rules",
    "Sampling": "inference.sampling",
    "PipelineLoss": "parallel.pipeline.staged_loss",
    "TrainState": "training.state",
    "Zero": "parallel.zero.stages",
    "abstract_state": "training.state",
    "attention": "parallel.attention.attention",
    "attention_local": "parallel.attention.attention_local",
    "audit": "analysis.hlo.audit",
    "balance": "parallel.attention.load_balance",
    "balanced_packing": "parallel.attention.packing",
    "cached_attention": "inference.kv_cache",
    "check": "analysis.layout.explain",
    "compile_for": "analysis.compile.ahead_of_time",
    "constrain": "sharding.layout",
    "current_layout": "sharding.layout",
    "draw_mask": "parallel.attention.plot",
    "eval_step": "training.step",
    "all_to_all_local": "parallel.collectives.hierarchical",
    "explain": "analysis.layout.explain",
    "to_device": "parallel.offload.host_weights",
    "first_of": "sharding.rules",
    "gather_weight": "parallel.zero.gather",
    "sharded_dot": "parallel.zero.gather",
    "hint": "sharding.layout",
    "interleave_batches": "parallel.overlap.interleave",
    "init": "training.state",
    "offload": "parallel.offload.placement",
    "one_bit_adam": "training.one_bit_adam",
    "over": "sharding.rules",
    "shard_array": "sharding.arrays",
    "restore": "checkpoint.restore",
    "roofline": "analysis.roofline",
    "save": "checkpoint.save",
    "schedule": "parallel.pipeline.schedules.registry",
    "simulate_devices": "utils.simulate_devices",
    "tag": "training.model",
    "train_step": "training.step",
}
_MODULES = ("errors", "testing")

__all__ = ["__version__", "errors", "testing", *_HOMES]  # noqa: PLE0604 (the homes are strings)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"jaxpar.{_HOMES[name]}"), name)
        globals()[name] = value
        _create_contexts()
        return value
    if name in _MODULES:
        return importlib.import_module(f"jaxpar.{name}")
    raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _create_contexts() -> None:
    if "jax" in sys.modules:
        importlib.import_module("jaxpar.utils.contexts")


_create_contexts()
