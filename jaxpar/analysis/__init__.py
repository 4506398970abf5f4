"""Static analysis of a layout before it runs: explain, estimate, audit, ahead-of-time compilation, comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.utils.public_names import public_names

if TYPE_CHECKING:
    from jaxpar.analysis.checkup.checkup import check_up as check_up
    from jaxpar.analysis.compile.ahead_of_time import compile_for as compile_for
    from jaxpar.analysis.hlo.audit import Audit as Audit
    from jaxpar.analysis.layout.draw_shards import draw_shards as draw_shards
    from jaxpar.analysis.layout.report import Report as Report
    from jaxpar.analysis.roofline import Roofline as Roofline
else:
    __getattr__, __dir__, __all__ = public_names(__name__, __file__)
