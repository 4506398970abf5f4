"""A function compiles once, also where its first call imports a part of the library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from profiles import few

PREPARE = """
import logging, re
import jax, jax.numpy as jnp, numpy as np, optax
import jaxpar as jp

jp.simulate_devices(2)
jax.config.update("jax_log_compiles", True)
compiled = []

class Log(logging.Handler):
    def emit(self, record):
        compiled.extend(re.findall(r"Finished XLA compilation of jit\\((\\w+)\\)", record.getMessage()))

logging.getLogger("jax").addHandler(Log())
logging.getLogger("jax").propagate = False
rules = jp.Rules(batch=None, seq="context", embed=None, heads=None, kv_heads=None, head_dim=None)
layout = jp.Layout(jp.MeshSpec(context=2).build(), rules)

def twice(call):
    "The names that the first and the second call compile."
    found = []
    for _ in range(2):
        compiled.clear()
        jax.block_until_ready(call())
        found.append(list(compiled))
    print(found)

x = np.ones((2, 4, 2, 8), np.float32)
"""

MODEL = """
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jp.tag(jnp.ones(8), "head_dim").value, logical_dims=("head_dim",))

    def __call__(self, x):
        x = x * self.scale[...]
        return jp.attention(x, x, x, impl=IMPL)

loss = lambda model, batch: jnp.mean(model(batch) ** 2)
with layout:
    state = jp.init(layout, lambda key: Model(nnx.Rngs(key)), optax.sgd(0.1))
"""

TRAIN = """
step = jp.train_step(layout, loss, donate=False)
twice(lambda: step(state, x)[1])
"""

EVALUATE = """
evaluate = jp.eval_step(layout, loss)
twice(lambda: evaluate(state, x))
"""

USER = """
@jax.jit
def attend(x):
    return jp.attention(x, x, x, impl=IMPL)

with layout:
    twice(lambda: attend(x))
"""

LOCAL = """
from jax.sharding import Mesh, PartitionSpec

mesh, spec = Mesh(np.array(jax.devices()), ("context",)), PartitionSpec(None, "context")
inside = lambda x: jp.context.attention_local(x, x, x, impl=IMPL)

@jax.jit
def attend(x):
    return jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

twice(lambda: attend(x))
"""

GENERATE = """
from jaxpar.models.llama.decode import cached_llama
from jaxpar.models.llama import LlamaConfig, make_llama

config = LlamaConfig(vocab=16, embed=8, layers=1, heads=2, kv_heads=2, head_dim=4, mlp=8)
rules = jp.Rules.from_dict({**rules.to_dict(), **dict.fromkeys(("residual_seq", "norm", "mlp", "vocab", "layers"))})
layout = jp.Layout(layout.mesh, rules)
model = jp.Generator(layout, make_llama(config), cached_llama(config), batch=1, slots=8)
params = jp.init(layout, make_llama(config), optax.identity()).params
twice(lambda: model.generate(params, [[1, 2]], most=[3]))
"""

IMPORTS = """
import importlib, pkgutil
import jax
import jaxpar

kernels = ["jax.experimental.pallas.ops.tpu.splash_attention"]
traced, blamed = [], []
f = jax.jit(lambda x: traced.append(x) or x)
f(1.0)
for name in [*(module.name for module in pkgutil.walk_packages(jaxpar.__path__, "jaxpar.")), *kernels]:
    importlib.import_module(name)
    traced.clear()
    f(1.0)
    blamed += [name] * len(traced)
print(blamed)
"""


def fresh(code: str) -> str:
    """Returns the last line that a new interpreter prints."""
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "name"),
    few([(MODEL + TRAIN, "step"), (MODEL + EVALUATE, "evaluate"), (USER, "attend"), (LOCAL, "attend")], 2, names=2),
    ids=["train_step", "eval_step", "jit", "shard_map"],
)
def test_the_first_attention_inside_a_trace_costs_no_second_compilation(code: str, name: str) -> None:
    assert fresh(f"{PREPARE}IMPL = 'ring'\n{code}") == str([[name], []])


@pytest.mark.slow
def test_a_generator_compiles_once() -> None:
    first, second = ast.literal_eval(fresh(PREPARE + GENERATE))
    assert {"_prefill", "_decode"} <= set(first) and second == []


@pytest.mark.slow
def test_no_import_makes_a_jitted_function_trace_again() -> None:
    """The test covers the modules of jaxpar and the kernels that attention imports on first use."""
    assert fresh(IMPORTS) == "[]"
