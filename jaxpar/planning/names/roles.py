"""Names for classes of dims, from what the program does with them: batch, seq, embed, heads, mlp, vocab, ..."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpar.planning.names.dim_classes import Dim, DimClasses, Use
from jaxpar.planning.names.fold import twice
from jaxpar.planning.names.primitive_rules import TracedValue

SPACE = ("depth", "height", "width")
"""The dims of images and volumes."""


@dataclass(frozen=True)
class DimName:
    """The name of a dim, or ``None`` for one that no rule shards, and the reason for it."""

    name: str | None
    reason: str


@dataclass(frozen=True)
class WeightProduct:
    """A product of an activation with a weight.

    Attributes:
      contracted: the dims of the activation that are summed over.
      kept: its other dims, without those that the weight has too.
      apart: the dims that both have and the product keeps apart.
    """

    contracted: Sequence[Dim]
    kept: Sequence[Dim]
    apart: Sequence[Dim]


@dataclass(frozen=True)
class ProgramArrays:
    """The arrays of a program.

    Attributes:
      params: the parameters, by path.
      batch: the arrays of the batch, by path.
      others: all values that the program makes.
      products: its products of activations with weights.
    """

    params: Mapping[str, TracedValue]
    batch: Mapping[str, TracedValue]
    others: tuple[TracedValue, ...]
    products: tuple[WeightProduct, ...] = ()


@dataclass
class ClassNames:
    """The names of all classes.

    Attributes:
      classes: the classes.
      by_class: the name of each class that has one.
      by_dim: names that the user gave to dims of several atoms.
      grouped: whether queries have more heads than keys.
      embed: the classes that are the width of a residual stream.
    """

    classes: DimClasses
    by_class: dict[int, DimName] = field(default_factory=dict)
    by_dim: dict[Dim, DimName] = field(default_factory=dict)
    grouped: bool = False
    embed: frozenset[int] = frozenset()

    def of(self, dim: Dim) -> DimName:
        """Returns the name of a dim: that of its major atom, or ``fused_`` and that of its equal parts."""
        flat = self.classes.flat(dim)
        if not flat:
            return DimName(None, "size 1")
        if flat in self.by_dim:
            return self.by_dim[flat]
        first = self.by_class.get(flat[0], DimName(None, "nothing in the program tells what it is"))
        if terms := self.classes.terms(flat[0]):
            return self._of_sum(terms, first)
        if Use.PARTS in self.classes.uses[flat[0]] and len(flat) > 1:
            return _fused(self.of(flat[1:]), self.classes.sizes[flat[0]])
        if first.name == "head_groups":  # all queries share one head of keys
            return DimName("heads", first.reason)
        if first.name == "heads" and self.grouped and not self.has_groups(flat):
            return DimName("kv_heads", "heads of keys and values, fewer than those of queries")
        return first

    def without_choices(self, given: Collection[int]) -> None:
        """Leave the dim of a router's scores without a name: every device scores all experts, its own and others."""
        for atom, found in self.by_class.items():
            if found.name == "experts" and atom not in given:
                self.by_class[atom] = DimName(None, "a router's scores, of all experts on every device")

    def has_groups(self, flat: Dim) -> bool:
        """Whether a dim is the product of the heads of keys and of the queries of each."""
        return len(flat) > 1 and all(
            a in self.by_class and self.by_class[a].name in ("heads", "head_groups") for a in flat[:2]
        )

    def _of_sum(self, terms: tuple[Dim, ...], own: DimName) -> DimName:
        names = [self.of(term) for term in terms if term]
        if own.name is not None and not own.name.startswith("features"):
            return own
        return _fused(names[0], len(names)) if len(names) > 1 else names[0] if names else own


def _fused(name: DimName, count: int) -> DimName:
    if name.name is None:
        return name
    return DimName(f"fused_{name.name}", f"{count} parts side by side, each: {name.reason}")


class _Roles:
    """What the roles are found from."""

    def __init__(self, classes: DimClasses, arrays: ProgramArrays):
        self.classes = classes
        self.places: dict[int, set[str]] = defaultdict(set)
        self.neighbours: dict[int, set[int]] = defaultdict(set)
        self.ranks = {path: len(value.dims) for path, value in arrays.params.items()}
        self.kernels: set[str] = set()
        for path, value in arrays.params.items():
            atoms = self.atoms(value)
            channels = [classes.flat(dim) for dim in value.dims[-2:]]
            if len(value.dims) > 2 and all(Use.CONVOLVED in classes.uses[a] for dim in channels for a in dim):
                self.kernels.add(path)
            for atom in atoms:
                self.places[atom].add(path)
                self.neighbours[atom] |= atoms - {atom}
        inputs = list(arrays.batch.values())
        self.rows = {atom for value in inputs if value.dims for atom in classes.flat(value.dims[0])}
        columns = {atom for value in inputs if len(value.dims) in (2, 3) for atom in classes.flat(value.dims[1])}
        features = {atom for value in inputs if len(value.dims) == 2 for atom in classes.flat(value.dims[1])}
        by_weights = {Use.CONTRACTED, Use.PRODUCED}
        self.columns = columns - {atom for atom in features if classes.uses[atom] & by_weights} - self.rows
        self.kept, self.per_head = defaultdict[int, set[int]](set), set[int]()
        flat = lambda dims: {atom for dim in dims for atom in classes.flat(dim)}
        for product in arrays.products:
            for atom in flat(product.contracted):
                self.kept[atom] |= flat(product.kept)
            if any(Use.SEPARATE in classes.uses[atom] for atom in flat(product.apart)):
                self.per_head |= flat(product.contracted)
        self.space = {
            atom: name
            for value in inputs
            if len(value.dims) > 3
            for name, dim in zip(SPACE[-len(value.dims[1:-1]) :], value.dims[1:-1], strict=False)
            for atom in classes.flat(dim)
        }
        self.scored, self.opposed = set[int](), set[int]()
        for value in arrays.others:
            if value.data and (found := twice(classes, value.dims) - self.rows):
                self.opposed |= found
                self.scored |= {atom for dim in value.dims for atom in classes.flat(dim)}
        self.looked_up = {self.classes.sizes[atom] for atom in self.places if Use.LOOKED_UP in classes.uses[atom]}
        sums = [atom for atom in range(len(classes.sizes)) if Use.PRODUCED in classes.uses[atom]]
        self.produced_parts = {one for atom in sums for term in classes.terms(atom) for one in term}
        self.embed = set(self._embed())

    def atoms(self, value: TracedValue) -> set[int]:
        """Returns the classes of an array's dims, and those that these are sums of."""
        found: set[int] = set()
        todo = [atom for dim in value.dims for atom in self.classes.flat(dim)]
        while todo:
            atom = todo.pop()
            found.add(atom)
            todo += [inner for term in self.classes.terms(atom) for inner in term if inner not in found]
        return found

    def _embed(self) -> Iterator[int]:
        """Of the classes that weights contract and produce, the one in most parameters, then those never beside it.

        A class between a table that is looked up and a head that is chosen from comes before those in more parameters.
        """
        no = {Use.SCANNED, Use.JOINED, Use.SEPARATE, Use.WINDOW, Use.PARTS, Use.PER_WEIGHT}
        inner = [a for a in self.places if self._inner(a) and not self.classes.uses[a] & no]
        inner = [a for a in inner if a not in self.scored and a not in self.per_head]
        taken: set[int] = set()
        for atom in sorted(inner, key=lambda a: (not self._at_both_ends(a), -len(self.places[a]), a)):
            beside = self.neighbours[atom] | self.kept[atom]  # in one parameter, or in one activation
            if beside & taken or (taken and Use.OPPOSED in self.classes.uses[atom]):
                continue
            if self._seldom_convolved(atom):
                taken.add(atom)
                yield atom

    def _mixed(self, atom: int) -> bool:
        """Whether weights mix what is at different places, as the tokens of an MLP-Mixer."""
        return any(atom in self.kept[width] and width in self.kept[atom] for width in self.embed)

    def _at_both_ends(self, atom: int) -> bool:
        uses = {use for other in self.neighbours[atom] for use in self.classes.uses[other]}
        return {Use.LOOKED_UP, Use.LABELLED} <= uses

    def _beside_heads(self, atom: int) -> bool:
        return any(Use.SEPARATE in self.classes.uses[b] or b in self.scored for b in self.neighbours[atom])

    def _seldom_convolved(self, atom: int) -> bool:
        """Whether a class is in fewer kernels of convolutions than other weights, as behind a patch embedding."""
        kernels = self.places[atom] & self.kernels
        weights = [path for path in self.places[atom] if self.ranks[path] > 1]
        return not kernels or len(weights) > 2 * len(kernels)

    def _inner(self, atom: int) -> bool:
        uses = self.classes.uses[atom]
        made = (
            Use.PRODUCED in uses
            or atom in self.produced_parts
            or bool({self.classes.sizes[b] for b in self.neighbours[atom] if Use.LOOKED_UP in self.classes.uses[b]})
        )
        return Use.CONTRACTED in uses and made and Use.LOOKED_UP not in uses

    def role(self, atom: int) -> DimName:
        """Returns the first name whose condition holds, without a number for classes that share it."""
        uses, size, count = self.classes.uses[atom], self.classes.sizes[atom], len(self.places[atom])
        in_head = Use.JOINED in uses or {Use.OPPOSED, Use.CONTRACTED} <= uses  # of queries and keys, or of values
        roles: tuple[tuple[bool, str | None, str], ...] = (
            (atom in self.rows, "batch", "the first dim of the batch's arrays"),
            (atom in self.columns, "seq", "the second dim of the batch's arrays"),
            (Use.SCANNED in uses and count > 0, "layers", "a scan takes one slice of it after the other"),
            (Use.LOOKED_UP in uses, "vocab", Use.LOOKED_UP),
            (Use.LABELLED in uses, "vocab", Use.LABELLED),
            (Use.INDEXED in uses, "positions", Use.INDEXED),
            (
                atom in self.opposed and Use.CONTRACTED not in uses,
                "seq",
                "twice in one activation, as attention scores",
            ),
            (self._mixed(atom), "seq", "contracted with weights, and kept where the width is contracted"),
            (Use.PER_WEIGHT in uses and not self._inner(atom), "experts", Use.PER_WEIGHT),
            (Use.SELECTED in uses, "experts", Use.SELECTED),
            (Use.SEPARATE in uses, "heads", Use.SEPARATE),
            (atom in self.scored and Use.OPPOSED in uses, "head_groups", "in attention scores, for queries alone"),
            (atom in self.scored, "heads", "in attention scores"),
            (atom in self.embed, "embed", f"in {count} parameters, contracted and produced by weights"),
            (in_head and self._beside_heads(atom), "head_dim", Use.JOINED),
            (atom in self.per_head, "head_dim", "contracted with a weight for each head, such as a learned query"),
            (Use.WINDOW in uses, None, Use.WINDOW),
            (Use.PARTS in uses, None, Use.PARTS),
            (Use.CONVOLVED in uses and not self._seldom_convolved(atom), "channels", Use.CONVOLVED),
            (atom in self.space, self.space.get(atom), "a dim of the batch's images"),
            (self._inner(atom), "mlp", "produced by a weight, then contracted with another"),
            (count > 0, "features", f"size {size}; no use of it tells more"),
        )
        return next((DimName(name, reason) for holds, name, reason in roles if holds), DimName(None, "an activation"))


def name_classes(classes: DimClasses, arrays: ProgramArrays, given: Mapping[int, DimName]) -> ClassNames:
    """Returns the names of all classes.

    Two classes of one role share its name, unless they occur in one parameter: then a number is appended.

    Args:
      classes: the classes, with repeated layers folded.
      arrays: the program's arrays.
      given: names that the user gave; they are kept.
    """
    roles = _Roles(classes, arrays)
    named = ClassNames(classes, dict(given), embed=frozenset(roles.embed))
    values = [*arrays.params.values(), *arrays.batch.values(), *arrays.others]
    everything = dict.fromkeys(atom for value in values for atom in roles.atoms(value))
    for atom in sorted(everything, key=lambda a: (-len(roles.places[a]), a)):
        if atom in named.by_class:
            continue
        found = roles.role(atom)
        taken = {named.by_class[b].name for b in roles.neighbours[atom] if b in named.by_class}
        name, number = found.name, 2
        while name is not None and name in taken and name not in ("heads", "seq", *SPACE):
            name, number = f"{found.name}_{number}", number + 1
        named.by_class[atom] = DimName(name, found.reason)
    named.grouped = any(named.has_groups(classes.flat(dim)) for value in arrays.params.values() for dim in value.dims)
    return named
