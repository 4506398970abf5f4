"""The types of the command line's arguments: how the help shows each.

An argument whose default is ``None`` says in its help what happens without it, so the help does not add the default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

type Config = Annotated[Path, Positional, arg(metavar="CONFIG", help="YAML file of the run")]
type Overrides = Annotated[
    UseAppendAction[tuple[str, ...]], arg(name="set", metavar="KEY=VALUE", help="change a key, such as train.steps=10")
]
type Texts = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")]
type File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
type Folder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")]
type Number = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
type Fraction = Annotated[float | None, arg(metavar="F", help_behavior_hint="")]
type Address = Annotated[str | None, arg(metavar="HOST:PORT", help_behavior_hint="")]
type TopologyName = Annotated[str | None, arg(metavar="TOPOLOGY", help_behavior_hint="")]
type Flag = Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")]
