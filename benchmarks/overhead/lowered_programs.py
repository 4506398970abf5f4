"""The lowered step of every configuration in ``configs/bench``, to compare two versions of the library.

    uv run python benchmarks/overhead/lowered_programs.py DIR            # write the programs
    uv run python benchmarks/overhead/lowered_programs.py DIR --compare  # compare with the programs written before

Needs no TPU and no TPU compiler: a step is lowered for ``v5e:4x4`` (64 devices: ``v5p:4x4x4``), not compiled. Equal
programs send, compute and store the same. Source locations are left out, also those inside kernels, whose bodies are
therefore not compared. Goal of ``--compare``: every program has the same text, or the same operations in another
order of the arrays that a loop carries. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from jaxpar.analysis.compile.ahead_of_time import aim, step_for
from jaxpar.analysis.compile.compilers import COMPILERS
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.sharding.hardware.topology import Topology

BENCH = Path(__file__).parents[2] / "configs" / "bench"
LARGE = "8b_1m_hybrid"
"""The configuration for 64 devices; the others are for 16."""


def lowered(config: Path) -> str:
    """Returns the StableHLO text of a configuration's step, without source locations and kernel bodies."""
    job = make_job(load_run(config))
    topology = Topology.parse("v5p:4x4x4" if config.stem == LARGE else "v5e:4x4")
    layout = aim(job.layout(topology.devices), topology)
    step, *inputs = step_for(layout, job.make_model, job.tx, job.loss_fn, job.batch_spec(), **job.step_options())
    leaves, structure = jax.tree.flatten(tuple(inputs))

    def flat(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(step(*jax.tree.unflatten(structure, arrays)))

    kernels = [jax.export.DisabledSafetyCheck.custom_call(kernel) for kernel in COMPILERS["tpu"].kernels]
    program = jax.export.export(jax.jit(flat), platforms=["tpu"], disabled_checks=kernels)(*leaves).mlir_module()
    without = re.sub(r"\bloc\([^\n]*\)$|^#loc.*$", "", program, flags=re.MULTILINE)
    return re.sub(r"(\\22body\\22: \\22)[A-Za-z0-9+/=]+", r"\1", without)


def operations(text: str) -> Counter[str]:
    """Returns how often each operation occurs, without the names of values and without the types that loops carry."""
    lines = (line.strip() for line in text.splitlines() if re.search(r"\b(stablehlo|sdy)\.(?!while|return)", line))
    return Counter(re.sub(r"%[\w#:]+|@\w+", "", line) for line in lines if "manual_computation" not in line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the programs")
    parser.add_argument("--compare", action="store_true", help="compare with the programs in DIR")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="configurations, such as 1b_fsdp16")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    good = True
    for config in sorted(BENCH.glob("*.yaml")):
        if options.only and config.stem not in options.only:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = lowered(config)
        file = options.folder / f"{config.stem}.mlir"
        if not options.compare:
            file.write_text(text, encoding="utf-8")
            verdict = f"{len(text)} characters"
        else:
            before = file.read_text(encoding="utf-8")
            same = operations(before) == operations(text)
            verdict = "the same text" if before == text else "the same operations" if same else "OTHER OPERATIONS"
            good &= same
        print(f"{config.stem:<20} {verdict}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
