"""The newest state of a script's step, and what its calls show about the results that continue it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpar.errors import StateError
from jaxpar.planning.script.carry import StatePart
from jaxpar.planning.script.trace import StepTrace


class HeldState:
    """The newest state, by the paths of the arguments.

    A trace tells most of which result continues which argument. A caller who passes a result of the last call as an
    argument proves it, so the second call settles what the trace leaves open and corrects what it got wrong.

    Args:
      trace: the step, as of its first call.
      arrays: the state that it is passed first, on its devices, by path.

    Attributes:
      parts: the parts of the state, apart from NNX objects.
      arrays: the newest arrays by path.
      calls: the number of steps that were taken.
      saved: the newest step that was saved before the flow of state was verified.
    """

    def __init__(self, trace: StepTrace, arrays: Mapping[str, Any]):
        self.parts = trace.parts
        self.arrays = dict(arrays)
        self.saved: int | None = None
        self._objects = trace.call.paths[: trace.call.in_objects]
        self._paths = dict(enumerate(trace.call.paths))
        self._returned: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._verified, self.calls = not trace.parts, 0

    def restored(self, arrays: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint, which tells which arrays are state."""
        self.arrays = dict(arrays)
        parts = [replace(part, sure=True) for part in self.parts if self._leaf_paths(part)[0] in arrays]
        mine = {path for part in parts for path in self._leaf_paths(part)} | set(self._objects)
        others = [i for i, path in self._paths.items() if path in arrays and path not in mine]
        self.parts = (*parts, *(StatePart(self._paths[i], range(i, i + 1), (), (), True, False) for i in others))

    def take(self, trace: StepTrace, outputs: Sequence[Any]) -> None:
        """Take the state that a step returned."""
        by_path = dict(zip(reversed(trace.result_paths), reversed(range(len(outputs))), strict=True))
        self.arrays = {path: outputs[i] for i, path in enumerate(self._objects)}
        for part in self.parts:
            if part.sure and part.results:
                ends = [path[len(part.path) :] for path in self._leaf_paths(part)]
                self.arrays |= {part.path + end: outputs[by_path[(part.results[0] + end).lstrip("/")]] for end in ends}
        self.calls += 1
        results = list(zip(trace.result_paths, outputs, strict=True))[trace.call.in_objects :]
        self._returned = {} if self._verified else {id(x): (weakref.ref(x), path) for path, x in results}

    def verify(self, paths: Sequence[str], arguments: Sequence[Any]) -> bool:
        """Compare what a caller passes with what the last call returned.

        Args:
          paths: those of the arguments.
          arguments: their arrays.

        Returns:
          Whether another result than the likeliest continues a part of the state.

        Raises:
          StateError: so it is, and a checkpoint was saved.
        """
        if self._verified or not self.calls:
            return False
        passed = {}
        for path, x in zip(paths, arguments, strict=True):
            reference, result = self._returned.get(id(x), (None, ""))
            if reference is not None and reference() is x:
                passed[path] = result
        times = Counter(passed.values())
        parts = list[StatePart]()
        for part in self.parts:
            parts += self._settled(part, {path: r for path, r in passed.items() if times[r] == 1})
        mine = {path for part in parts for path in self._leaf_paths(part)}
        for i, path in self._paths.items():
            if times[passed.get(path, "")] == 1 and path in passed and path not in mine:
                parts.append(StatePart(path, range(i, i + 1), (-1,), (passed[path],), True, False))
        likeliest = {part.path: part.results[:1] for part in self.parts if part.sure}
        wrong = [p for p in parts if p.sure and likeliest.get(p.path, ()) not in ((), p.results[:1])]
        if wrong and self.saved is not None:
            part = wrong[0]
            raise StateError(
                f"train_step: the checkpoint of step {self.saved} has result {likeliest[part.path][0]!r} as "
                f"{part.path!r}, which result {part.results[0]!r} continues, as this call shows. Remedy: delete "
                f"it, and say so: {self._remedy(parts)}."
            )
        self.parts = tuple(parts)
        self._verified = all(part.decided for part in parts)
        return any(part.placed for part in wrong)

    def check(self, what: str) -> None:
        """Raises an error if it is not known what the state is.

        Raises:
          StateError: several results may continue an argument, or an argument may be data.
        """
        for part in self.parts:
            if not part.sure:
                text = f"it is open whether {part.path!r} is state, which result {part.results[0]!r} continues, or data"
            elif self.calls and len(part.results) != 1:
                results = " or ".join(map(repr, part.results)) or "no result that is known"
                text = f"it is open which result of train_step continues {part.path!r}: {results}"
            else:
                continue
            raise StateError(
                f"{what}: {text}. Remedy: say which result continues each argument that is state, as in "
                f"{self._remedy(self.parts)}; or pass the results to the next call first, which settles it."
            )

    def known(self) -> dict[str, str]:
        """Returns the path of the result that likely continues each part that is placed as state."""
        return {part.path: part.results[0] for part in self.parts if part.placed and part.results}

    def _remedy(self, parts: Sequence[StatePart]) -> str:
        items = (
            f"{part.path!r}: {result if result.isdecimal() else repr(result)}"
            for part in parts
            for result in part.results[:1]
        )
        return f"parallelize(..., state={{{', '.join(items)}}})"

    def _leaf_paths(self, part: StatePart) -> list[str]:
        return [self._paths[i] for i in part.arrays]

    def _settled(self, part: StatePart, passed: Mapping[str, str]) -> list[StatePart]:
        """A part as a caller continues it, or its arrays if they come from several results."""
        leaves = {path: passed[path] for path in self._leaf_paths(part) if path in passed}
        if not leaves:
            return [part]
        ends = {path: path[len(part.path) :] for path in leaves}
        whole = {
            f"/{r}".removesuffix(ends[path])[1:] if f"/{r}".endswith(ends[path]) else None for path, r in leaves.items()
        }
        (result, *others) = whole
        if result is not None and not others:
            return [replace(part, results=(result,), starts=(-1,), sure=True)]
        singles = []
        for i in part.arrays:
            path = self._paths[i]
            guess = part.results[0] + path[len(part.path) :]
            singles.append(replace(part, path=path, arrays=range(i, i + 1), results=(passed.get(path, guess),)))
        return singles
