"""Every jax user context of jaxpar. No other module creates one.

jit's cache key holds the value of every context that exists. A context that is created while jax traces a function
changes the key, so the next call of that function misses the cache and compiles again. This module therefore creates
all contexts together, and imports Pallas, which creates contexts at import. :mod:`jaxpar.sharding.layout` imports this
module, and ``import jaxpar`` does so if jax is already loaded, so the contexts exist before anything is traced.
"""

from __future__ import annotations

import jax

# Creates the three contexts of Pallas, which attention kernels would otherwise create while jax traces.
import jax.experimental.pallas.fuser

ambient_layout = jax.make_user_context(None)
"""The :class:`jaxpar.Layout` of ``with layout:``."""

hint_observer = jax.make_user_context(None)
"""The callback ``(call_site, dims, x, resolved)`` that receives every ``constrain`` and ``hint``, which then raise
nothing."""

batch_specs = jax.make_user_context(None)
"""The ``PartitionSpec`` of each array of the batch that a step is called with, if one shards more than its rows.

Under Auto axes a trace does not know how its arguments are sharded."""

attention_observer = jax.make_user_context(None)
"""The callback ``(call_site, q, k, choice)`` that receives every choice of ``attention(impl="auto")``."""

experts_observer = jax.make_user_context(None)
"""The callback ``(call_site, plan, why)`` that receives how every call of ``experts`` dispatches its rows."""

repair_observer = jax.make_user_context(None)
"""The callback that receives, as :class:`jaxpar.parallel.partitioner.repair.Repaired`, every operation that XLA's
partitioner would compute wrongly."""

matmul_observer = jax.make_user_context(None)
"""The callback ``(call_site, x, ws, routes)`` that receives every matmul that is sharded in several dimensions."""

experts_traced = jax.make_user_context(None)
"""``"whole"`` or ``"pieces"`` in a program that is traced for its dims and never runs: ``experts`` multiplies rows by
``jax.lax.ragged_dot``, whose dims are known, and with ``"pieces"`` computes them again in the backward pass."""

step_precision = jax.make_user_context(None)
"""The :class:`jaxpar.Precision` of the step that is being traced."""

keep_gathered = jax.make_user_context(False)
"""Whether remat policies keep gathered weights for the backward pass, also where the model would gather them again."""

batch_rows = jax.make_user_context(None)
"""The :class:`jaxpar.parallel.batch_rows.BatchRows` of the part of a batch that is being traced."""

rows_wanted = jax.make_user_context(False)
"""Whether the trace has row numbers; see :func:`jaxpar.parallel.batch_rows.numbering`."""

param_dims = jax.make_user_context(())
"""The logical dims of the parameters, by path, while a state is built: the optimizer's ``init`` may read them."""
