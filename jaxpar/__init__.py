"""jaxpar: explained and proven parallelism for Flax models.

The public names load on first use, so that ``import jaxpar`` costs nothing and imports no jax. Where jax is already loaded,
it creates jaxpar's jax contexts, so that none is created later while jax traces (:mod:`jaxpar.contexts`).

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
    from jaxpar.arrays import put as put
    from jaxpar.asynchronous import AsynchronousStep as AsynchronousStep
    from jaxpar.attn.context import Context as Context
    from jaxpar.attn.dispatch import attention as attention
    from jaxpar.attn.local import attention_local as attention_local
    from jaxpar.attn.masks import Mask as Mask
    from jaxpar.attn.packing import balanced_order as balanced_order
    from jaxpar.attn.work import balance as balance
    from jaxpar.checkpoint.managing import CheckpointManager as CheckpointManager
    from jaxpar.checkpoint.reading import restore as restore
    from jaxpar.checkpoint.writing import save as save
    from jaxpar.copies import in_copies as in_copies
    from jaxpar.disk import DiskStep as DiskStep
    from jaxpar.exchange import exchange_local as exchange_local
    from jaxpar.fusion import Fusion as Fusion
    from jaxpar.host import offload as offload
    from jaxpar.infer.cached import Cached as Cached
    from jaxpar.infer.caching import cached_attention as cached_attention
    from jaxpar.infer.generating import Generator as Generator
    from jaxpar.infer.sampling import Sampling as Sampling
    from jaxpar.inspect.audit import audit as audit
    from jaxpar.inspect.explain import check as check
    from jaxpar.inspect.explain import explain as explain
    from jaxpar.int8 import Int8 as Int8
    from jaxpar.layout import Layout as Layout
    from jaxpar.layout import constrain as constrain
    from jaxpar.layout import current_layout as current_layout
    from jaxpar.layout import hint as hint
    from jaxpar.mesh import MeshSpec as MeshSpec
    from jaxpar.model import tag as tag
    from jaxpar.onebit import one_bit_adam as one_bit_adam
    from jaxpar.plan.aot import compile_for as compile_for
    from jaxpar.plan.roofline import roofline as roofline
    from jaxpar.precision import Precision as Precision
    from jaxpar.recompute import Recompute as Recompute
    from jaxpar.rules import Rules as Rules
    from jaxpar.rules import first_of as first_of
    from jaxpar.rules import over as over
    from jaxpar.simulate import simulate_devices as simulate_devices
    from jaxpar.state import TrainState as TrainState
    from jaxpar.state import abstract_state as abstract_state
    from jaxpar.state import init as init
    from jaxpar.step import eval_step as eval_step
    from jaxpar.step import train_step as train_step
    from jaxpar.waiting import fetch as fetch
    from jaxpar.weights import gather_weight as gather_weight
    from jaxpar.weights import project as project
    from jaxpar.woven import Branch as Branch
    from jaxpar.zero import Zero as Zero

_HOMES = {
    "Asynchronous": "pipeline.asked",
    "AsynchronousStep": "asynchronous",
    "Branch": "woven",
    "Cached": "infer.cached",
    "CheckpointManager": "checkpoint.managing",
    "Context": "attn.context",
    "DiskStep": "disk",
    "Fusion": "fusion",
    "Generator": "infer.generating",
    "Int8": "int8",
    "Layout": "layout",
    "Mask": "attn.masks",
    "MeshSpec": "mesh",
    "Pipeline": "pipeline.asked",
    "Precision": "precision",
    "Recompute": "recompute",
    "Rules": "rules",
    "Sampling": "infer.sampling",
    "Staged": "staged",
    "TrainState": "state",
    "Zero": "zero",
    "abstract_state": "state",
    "attention": "attn.dispatch",
    "attention_local": "attn.local",
    "audit": "inspect.audit",
    "balance": "attn.work",
    "balanced_order": "attn.packing",
    "cached_attention": "infer.caching",
    "check": "inspect.explain",
    "compile_for": "plan.aot",
    "constrain": "layout",
    "current_layout": "layout",
    "eval_step": "step",
    "exchange_local": "exchange",
    "explain": "inspect.explain",
    "fetch": "waiting",
    "first_of": "rules",
    "gather_weight": "weights",
    "project": "weights",
    "hint": "layout",
    "in_copies": "copies",
    "init": "state",
    "offload": "host",
    "one_bit_adam": "onebit",
    "over": "rules",
    "put": "arrays",
    "restore": "checkpoint.reading",
    "roofline": "plan.roofline",
    "save": "checkpoint.writing",
    "schedule": "schedules.named",
    "simulate_devices": "simulate",
    "tag": "model",
    "train_step": "step",
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
        importlib.import_module("jaxpar.contexts")


_create_contexts()
