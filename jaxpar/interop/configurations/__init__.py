"""Configurations of other systems as runs of jaxpar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.utils.public_names import public_names

if TYPE_CHECKING:
    from jaxpar.interop.configurations.deepspeed.translate import import_deepspeed as import_deepspeed
    from jaxpar.interop.configurations.keys import ImportOptions as ImportOptions
    from jaxpar.interop.configurations.megatron.script import read_script as read_script
    from jaxpar.interop.configurations.megatron.translate import import_megatron as import_megatron
    from jaxpar.interop.configurations.mindformers.translate import import_mindformers as import_mindformers
    from jaxpar.interop.configurations.report import ImportedRun as ImportedRun
    from jaxpar.interop.configurations.report import ImportReport as ImportReport
    from jaxpar.interop.configurations.report import KeyRow as KeyRow
else:
    __getattr__, __dir__, __all__ = public_names(__name__, __file__)
