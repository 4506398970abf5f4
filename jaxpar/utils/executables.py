"""``compile_once``: equal programs share one executable, whatever Python function they were traced from."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable

import jax

_MOST = 8
"""The largest number of executables that are kept."""

_kept: OrderedDict[Hashable, jax.stages.Compiled] = OrderedDict()
_lock = threading.Lock()


def compile_once(lowered: jax.stages.Lowered, key: Hashable) -> jax.stages.Compiled:
    """Returns the executable of a program; equal programs are compiled once.

    Programs are compared by their text, not by the function, so a function that is defined anew (a notebook cell that
    runs again), or that reads a variable that has changed, gets what belongs to it. An executable holds neither the
    function nor what the function refers to, and the last few only are kept.

    Args:
      lowered: the program. Its inputs and outputs are trees of arrays, without other objects in their structure.
      key: what the text does not say: devices and compiler options.

    >>> double = lambda n: jax.jit(lambda x: n * x).lower(1.0)
    >>> one, same, other = (compile_once(double(n), "cpu") for n in (2, 2, 3))
    >>> one is same, one is other
    (True, False)
    """
    text = lowered.as_text()
    # The text of a host callback does not say which function it calls. Constants that become arguments are not in it.
    if "callback" in text or getattr(jax.config, "jax_use_simplified_jaxpr_constants", False):
        return lowered.compile()
    entry = hashlib.sha256(text.encode()).digest(), key
    with _lock:
        if entry in _kept:
            _kept.move_to_end(entry)
            return _kept[entry]
    compiled = lowered.compile()
    with _lock:
        _kept[entry] = compiled
        while len(_kept) > _MOST:
            _kept.popitem(last=False)
    return compiled
