"""``parallelize``: the train step of a single-device script, run on all devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from jaxpar.checkpoint.manager import CheckpointManager
from jaxpar.errors import ModelError
from jaxpar.planning.names.given import Patterns
from jaxpar.planning.script.carry import Continued
from jaxpar.planning.script.choose import SEARCHED, Chosen, choose
from jaxpar.planning.script.naming import NamedStep
from jaxpar.planning.script.parallel_step import ParallelStep, manager_of
from jaxpar.planning.script.trace import StepTrace
from jaxpar.planning.search.search import SearchOptions
from jaxpar.sharding.hardware.topology import Topology


def parallelize(
    train_step: Callable[..., Any],
    *args: Any,
    layout: Chosen = None,
    checkpoints: str | os.PathLike[str] | CheckpointManager | None = None,
    save_interval_steps: int | None = None,
    names: Patterns | None = None,
    topology: str | Topology | None = None,
    search: SearchOptions = SEARCHED,
    donate: bool = True,
    axis_name: str | None = None,
    state: Continued | None = None,
    progress: Callable[[str], None] = print,
    **kwargs: Any,
) -> ParallelStep:
    """Returns a script's own train step, to be called as before, that runs on all devices.

    The step is traced once, with the arguments of its first call, for shapes alone. The names of the dims of its
    parameters are found in the part of it that computes the loss, as by :func:`jaxpar.annotate`. Then the state is
    placed by a layout, and the same program is compiled with constraints on its weights and activations.

    Args:
      train_step: the script's function, jitted or not: ``train_step(model, optimizer, batch)`` with NNX objects that it
        changes in place, or ``train_step(state, batch)`` that returns the new state, a ``flax.training.TrainState`` or
        any pytree, with further results such as the loss. Other arguments, such as keys, are passed on.
      *args: the arguments of its first call, with arrays of the batch ``[batch, ...]``.
      layout: ``None`` or ``"auto"`` for the best plan of the hardware, and FSDP where its speed is unknown, as on
        simulated devices; ``"data"``, ``"zero1"``, ``"fsdp"``; or a ``Plan``, ``Rules`` or :class:`jaxpar.Layout`.
      checkpoints: a folder, or a :class:`jaxpar.CheckpointManager`. The newest checkpoint in it is restored.
      save_interval_steps: save after this many steps; without it, only :meth:`ParallelStep.save` saves.
      names: as for :func:`jaxpar.annotate`, with paths as ``print(step)`` shows them.
      topology: plan for this hardware instead of that of this machine's devices; of as many devices.
      search: how many plans are compiled before one is chosen, on hardware that there is a compiler for.
      donate: whether a step may overwrite the state that it is passed, which saves the memory of a copy.
      axis_name: of the axis over which the step averages, as in ``jax.lax.pmean(grads, "batch")``, if it was made for
        ``jax.pmap``. All means are then those of the global batch.
      state: name of an argument, or path of a part of it → index or path of the result that the next call is passed in
        its place, as in ``{"student": 1, "teacher": 0}``. Without it, results continue the arguments whose arrays they
        carry on, and the second call shows what that leaves open.
      progress: is given a line for each plan that is compiled.
      **kwargs: keyword arguments of the first call.

    Returns:
      The step. Its ``state`` is the state on its devices; NNX objects are placed where they are. ``print`` shows the
      layout, why it was chosen, and every array with the names of its dims and its sharding.

    Raises:
      LayoutError: the batch does not divide over the devices, or the given rules cannot place an array.
      ModelError: ``train_step`` is no function, returns no state, or computes no loss.
      AnnotationError: as for :func:`jaxpar.annotate`.
      CheckpointError, DamagedError: as for :meth:`jaxpar.CheckpointManager.restore_latest`.
      ConfigError: an argument has no valid value.
      PlanError: no plan fits.

    >>> import jax, numpy as np, optax
    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> tx = optax.adam(1e-2)
    >>> @jax.jit
    ... def train_step(state, batch):
    ...     loss_fn = lambda p: ((batch["x"] + jax.nn.relu(batch["x"] @ p["up"]) @ p["down"]) ** 2).mean()
    ...     loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    ...     updates, opt = tx.update(grads, state["opt"])
    ...     return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss
    >>> params = {"up": jnp.full((8, 32), 0.1), "down": jnp.full((32, 8), 0.1)}
    >>> state, batch = {"params": params, "opt": tx.init(params)}, {"x": np.ones((16, 8), np.float32)}
    >>> train_step = jp.parallelize(train_step, state, batch)
    >>> state = train_step.state
    >>> state, loss = train_step(state, batch)
    >>> state["params"]["up"].sharding.spec, train_step.choice.name, round(float(loss), 3)
    (P('data', None), 'FSDP 8', 12.674)
    """
    if not callable(train_step):
        raise ModelError(
            f"train_step must be a function, got {type(train_step).__name__}. Remedy: pass the script's train step, "
            "and then the arguments of its first call: parallelize(train_step, model, optimizer, batch)."
        )
    step = NamedStep.of(StepTrace.of(train_step, args, kwargs, axis_name, state), names)
    choice = choose(step, layout, topology=topology, options=search, progress=progress)
    manager = manager_of(checkpoints, save_interval_steps)
    return ParallelStep(
        train_step, step, choice, args, kwargs, manager=manager, donate=donate, axis_name=axis_name, state=state
    )
