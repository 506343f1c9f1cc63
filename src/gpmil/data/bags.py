"""Bags: a cohort of bags of instances, ragged and immutable.

All instances lie in one (N, D) array; bag b is rows ``offsets[b]:offsets[b + 1]``.  Labels,
names, groups (patients), positions, instance labels and the neighbour graph travel along, and
every subset is a ``Bags`` again, so scikit-learn can split one as if it were an array.
Arguments are checked in ``gpmil.data.checks`` and ``gpmil.data.positions``.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_array, issparse

from gpmil.data import checks, extraction, graphs, positions
from gpmil.data.checks import UNKNOWN, PerBag, PerInstance, count, listed, offsets_of
from gpmil.data.classes import Labels
from gpmil.data.digests import FeatureDigest
from gpmil.data.frames import Table
from gpmil.data.graphs import Coords, Offsets
from gpmil.data.positions import Steps

ROOM = 1 << 28  # bytes of a subset of a file that are read into memory
_CHUNK = 1 << 24  # values examined at a time when looking for NaN, so that a memmap stays one


class Bags:
    """A cohort of bags: features, labels, positions and neighbour graph, ragged and immutable.

    Most cohorts come from `from_arrays`, `from_frame` or a reader; this constructor takes what
    lies in memory (or in a ``np.memmap``) already joined.

    Parameters
    ----------
    features : (N, D)
        Instances of all bags, bag after bag.  float16, float32 and float64 are kept, as is a
        ``np.memmap``; integers become float64.  NaN and infinity are errors (for a memmap only
        when `check_finite` is called, which models do).
    offsets : (B + 1,)
        Bag b is rows ``offsets[b]:offsets[b + 1]``; at least one row a bag.
    labels : (B,), optional
        0 or 1, -1 or missing: unlabelled.  Any others need `positive`.
    names : (B,), optional
        Default "bag0", "bag1", ...  `from_arrays` and `from_frame` refuse a name given twice.
    groups : (B,), optional
        Patients, say: bags that must not be split between training and test.
    coords : (N, k), optional
        Positions, k = 1, 2 or 3.
    instance_labels : (N,), optional
        0 or 1, -1 or missing: unknown.
    adjacency : (N, N) sparse, optional
        A finished neighbour graph; takes precedence over `edges`, `coords` and `graph`.
    step : number, pair, one a bag, or (B, k)
        Distance of neighbouring patches.  A tuple of k numbers is one an axis; a list or array
        of B numbers one a bag (the type decides only where k = B, and that is said).
        None: inferred from the coordinates where the graph needs it, and said.
    graph : "grid4", "grid8", "radius", "knn", "chain" or None
        How coordinates make neighbours, see ``gpmil.data.graphs``.
    metadata : dict, optional
        A few facts that travel along, such as ``{"encoder": "uni_v1", "magnification": 20}``;
        `facts` are those that models compare.
    edges : one array a bag, optional
        (E, 2) local indices or (E, 3) with weights; coordinates then serve maps only.
    positive, negative, exclude : optional
        The labels that count as 1, as 0 and as unlabelled: a value, several ("a,b" or a list),
        or a comparison such as ">=2".  Of two classes one is enough, of more each must be said.
    radius, n_neighbors
        For graph="radius" (default 1.5 steps) and graph="knn".

    Attributes
    ----------
    features, offsets, sizes, labels, names, groups, coords, instance_labels, adjacency, step,
    graph, class_names, metadata, facts, n_instances, n_features, bag_index, has_geometry, shape

    Examples
    --------
    >>> bags = Bags(np.arange(10.0).reshape(5, 2), [0, 3, 5], labels=[1, 0], names=["a", "b"],
    ...             coords=[[0, 0], [0, 1], [1, 1], [5, 5], [6, 5]], step=1, graph="grid4")
    >>> bags
    Bags: 2 bags (1 positive, 1 negative), 5 instances x 2 features, float64
      instances a bag: 2 to 3, median 2.5
      graph: grid4, 3 edges, 1.2 neighbours an instance, 0 instances without
    >>> bags[1].features
    array([[6., 7.],
           [8., 9.]])
    """

    features: Float[np.ndarray, "n d"]
    offsets: Offsets
    labels: PerBag
    names: np.ndarray
    groups: np.ndarray | None
    coords: Coords | None
    instance_labels: PerInstance
    adjacency: csr_array
    step: Steps | None
    graph: str | None
    class_names: tuple[str, str] | None
    _metadata: dict[str, Any]
    _finite = False  # whether somebody has looked
    _digests: PerBag | None = None  # where they are known

    def __init__(
        self,
        features: Any,
        offsets: Any,
        labels: Any = None,
        names: Any = None,
        groups: Any = None,
        coords: Any = None,
        instance_labels: Any = None,
        adjacency: Any = None,
        step: Any = None,
        graph: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        edges: Any = None,
        positive: Any = None,
        radius: Any = None,
        n_neighbors: int = 8,
        negative: Any = None,
        exclude: Any = None,
    ) -> None:
        features = checks.as_features(features, "features")
        offsets = checks.as_offsets(offsets, len(features))
        names = checks.as_names(names, len(offsets) - 1)
        checks.require_instances(offsets, names)
        labels, class_names = checks.encode_labels(labels, len(names), positive, negative, exclude)
        instance_labels = checks.encode_instance_labels(instance_labels, len(features))
        checks.mention_contradictions(instance_labels, labels, offsets, names)
        coords = positions.as_coords(coords, offsets, names)
        step = positions.as_step(step, names, coords)
        if adjacency is not None:
            adjacency, graph = positions.as_adjacency(adjacency, offsets), graph or "edges"
        elif edges is not None:
            adjacency, graph = positions.graph_from_edges(edges, offsets, names), "edges"
        else:
            adjacency, graph, step = positions.graph_from_coords(
                coords, offsets, names, graph, step, radius, n_neighbors
            )
        self._store(
            features=features,
            offsets=offsets,
            labels=labels,
            names=names,
            groups=checks.as_groups(groups, names),
            coords=coords,
            instance_labels=instance_labels,
            adjacency=adjacency,
            step=step,
            graph=graph,
            class_names=class_names,
            _metadata=dict(metadata or {}),
        )
        if not isinstance(features, np.memmap):
            self.check_finite()

    # -------------------------------------------------------------- other ways in

    @classmethod
    def from_arrays(
        cls,
        arrays: Any,
        labels: Any = None,
        coords: Any = None,
        step: Any = None,
        graph: str | None = "grid4",
        edges: Any = None,
        names: Any = None,
        groups: Any = None,
        instance_labels: Any = None,
        positive: Any = None,
        radius: Any = None,
        n_neighbors: int = 8,
        metadata: Mapping[str, Any] | None = None,
        negative: Any = None,
        exclude: Any = None,
    ) -> "Bags":
        """A cohort from one (n_b, D) array a bag.

        `coords`, `edges` and `instance_labels` are likewise one array a bag: (n_b, k),
        (E, 2) or (E, 3), and (n_b,); an entry of `instance_labels` may be None.  The rest is
        as in the constructor.

        Examples
        --------
        >>> slides = [np.ones((4, 3)), np.zeros((2, 3))]
        >>> positions = [[(0, 0), (0, 256), (256, 0), (256, 256)], [(0, 0), (256, 0)]]
        >>> bags = Bags.from_arrays(slides, ["tumour", "benign"], coords=positions, step=256,
        ...                         positive="tumour")
        >>> bags.labels, bags.class_names, bags.adjacency.nnz // 2
        (array([1, 0]), ('benign', 'tumour'), 5)
        """
        parts = checks.one_a_bag(arrays, "arrays")
        names = checks.as_names(names, len(parts))
        checks.refuse_same_names(names)
        parts = [checks.as_features(a, f"arrays, bag '{who}'") for a, who in zip(parts, names)]
        sizes = np.array([len(part) for part in parts])
        checks.require_instances(offsets_of(sizes), names)
        return cls(
            checks.concatenate(parts, "arrays", "features", names),
            offsets_of(sizes),
            labels=labels,
            names=names,
            groups=groups,
            coords=positions.join_coords(coords, sizes, names),
            instance_labels=checks.join_instance_labels(instance_labels, sizes, names),
            step=step,
            graph=graph,
            metadata=metadata,
            edges=edges,
            positive=positive,
            radius=radius,
            n_neighbors=n_neighbors,
            negative=negative,
            exclude=exclude,
        )

    @classmethod
    def from_frame(
        cls,
        df: Any,
        bag: str = "slide",
        label: str | None = "label",
        features: str | Sequence[str] | None = None,
        coords: str | Sequence[str] | None = ("x", "y"),
        group: str | None = None,
        instance_label: str | None = None,
        step: Any = None,
        graph: str | None = "grid4",
        positive: Any = None,
        radius: Any = None,
        n_neighbors: int = 8,
        metadata: Mapping[str, Any] | None = None,
        negative: Any = None,
        exclude: Any = None,
    ) -> "Bags":
        """A cohort from a table with one row an instance.

        Parameters
        ----------
        df : pandas.DataFrame
            The rows of a bag need not be together.  Bags come in order of first appearance,
            instances in order of their rows.
        bag, label, group, instance_label : column names
            `label` and `group` must be constant within a bag.  A table without a column
            "label" is a cohort without labels.
        features : list of columns, or the beginning of their names such as "feature_"
            Default: every numeric column not named otherwise.
        coords : one to three column names, or None
            A table with neither "x" nor "y" is a cohort without positions.

        The rest is as in the constructor.
        """
        table = Table(df, bag)
        label = table.label_column(label)
        axes = table.coord_columns(coords)
        used = [c for c in (bag, label, group, instance_label, *axes) if c is not None]
        return cls(
            table.numbers(table.feature_columns(features, used), "features"),
            table.offsets,
            labels=table.constant(label, "label"),
            names=table.names,
            groups=table.constant(group, "group"),
            coords=table.numbers(axes, "coords") if axes else None,
            instance_labels=table.column(instance_label, "instance_label"),
            step=step,
            graph=graph,
            metadata=metadata,
            positive=positive,
            radius=radius,
            n_neighbors=n_neighbors,
            negative=negative,
            exclude=exclude,
        )

    # -------------------------------------------------------------- facts

    @property
    def sizes(self) -> PerBag:
        """Number of instances of each bag, (B,)."""
        return np.diff(self.offsets)

    @property
    def n_instances(self) -> int:
        """Number of instances, N."""
        return len(self.features)

    @property
    def n_features(self) -> int:
        """Number of features, D."""
        return self.features.shape[1]

    @property
    def bag_index(self) -> PerInstance:
        """Number of the bag each instance belongs to, (N,)."""
        return graphs.bag_index(self.offsets)

    @property
    def has_geometry(self) -> bool:
        """Whether coordinates or edges were given."""
        return self.coords is not None or self.graph is not None

    @property
    def metadata(self) -> dict[str, Any]:
        """A copy of the facts that travel along."""
        return dict(self._metadata)

    @property
    def facts(self) -> Mapping[str, Any]:
        """How the features were extracted, as far as `metadata` says.

        encoder, magnification, mpp (microns per pixel), patch_size and overlap (pixels at that
        magnification), downsample. A model refuses bags that differ from those of its fit.
        """
        return MappingProxyType(extraction.known(self._metadata))

    @property
    def shape(self) -> tuple[int]:
        """(B,): to scikit-learn a cohort is a column of B samples."""
        return (len(self),)

    def split(self, values: Any) -> list[Any]:
        """Cut anything with one row an instance (N, ...) into one piece a bag."""
        if len(values) != self.n_instances:
            raise ValueError(
                f"split: expected one row an instance, {self.n_instances} in all, "
                f"found {len(values)}"
            )
        return [values[a:b] for a, b in zip(self.offsets[:-1], self.offsets[1:])]

    def check_finite(self) -> None:
        """Raise ValueError, naming the bags, if a feature is NaN or infinite.

        Features in memory are looked at once, and those that `gpmil.read` keeps in its cache when
        it is made; those in any other file each time.
        """
        if self._finite:
            return
        rows = max(1, _CHUNK // max(1, self.n_features))
        bad = np.zeros(self.n_instances, dtype=np.int64)
        for start in range(0, self.n_instances, rows):
            finite = np.isfinite(self.features[start : start + rows])
            if not finite.all():
                bad[start : start + rows] = (~finite).sum(axis=1)
        if bad.any():
            where = np.unique(self.bag_index[bad > 0])
            raise ValueError(
                f"features: {bad.sum():,} values are NaN or infinite, in {len(where)} of "
                f"{len(self)} bags: {listed(self.names[where])}. "
                "Remove those instances or compute their features again."
            )
        self._store(_finite=not isinstance(self.features, np.memmap))

    def digests(self) -> PerBag:
        """A number per bag that tells its features from any others, (B,)."""
        if self._digests is not None:
            return self._digests
        found = np.zeros(len(self), dtype=np.int64)
        for b, own in enumerate(self.split(self.features)):
            digest = FeatureDigest()
            digest.add(own)
            found[b] = digest.number
        if not isinstance(self.features, np.memmap):
            self._store(_digests=found)
        return found

    # -------------------------------------------------------------- a sequence of bags

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, key: Any) -> "Bags":
        """The chosen bags as Bags: an int, slice, list or array of ints, or boolean mask."""
        return self._take(_chosen(key, len(self)))

    def __iter__(self) -> Iterator["Bags"]:
        for b in range(len(self)):
            yield self[b]

    def _take(self, chosen: Int[np.ndarray, " chosen"]) -> "Bags":
        offsets = offsets_of(self.sizes[chosen])
        rows = _rows(self.offsets, chosen, offsets)
        subset = object.__new__(type(self))
        subset._store(
            features=_take_features(self.features, rows),
            offsets=offsets,
            labels=self.labels[chosen],
            names=self.names[chosen],
            groups=None if self.groups is None else self.groups[chosen],
            coords=None if self.coords is None else self.coords[rows],
            instance_labels=self.instance_labels[rows],
            adjacency=_take_blocks(self.adjacency, self.offsets, chosen, offsets, rows),
            step=None if self.step is None else self.step[chosen],
            graph=self.graph,
            class_names=self.class_names,
            _metadata=self._metadata,
            _finite=self._finite,
            _digests=None if self._digests is None else self._digests[chosen],
        )
        return subset

    def in_memory(self) -> "Bags":
        """The same bags; features in a file are read into memory, for whoever needs them again."""
        if not isinstance(self.features, np.memmap):
            return self
        return self._changed(features=np.array(self.features))

    def _with_labels(self, found: Labels, groups: Any = None) -> "Bags":
        """The same bags with other labels, and other groups where they are given."""
        checks.mention_contradictions(self.instance_labels, found.values, self.offsets, self.names)
        return self._changed(
            labels=found.values,
            class_names=found.names,
            groups=self.groups if groups is None else checks.as_groups(groups, self.names),
            _metadata=self._metadata | {"classes": found.classes},
        )

    def _with_groups(self, groups: Any) -> "Bags":
        """The same bags, of other groups."""
        return self._changed(groups=checks.as_groups(groups, self.names))

    def with_digests(self, digests: PerBag) -> "Bags":
        """The same bags, with what was seen when their file was made: it holds finite values."""
        return self._changed(_digests=digests, _finite=True)

    def _changed(self, **fields: Any) -> "Bags":
        other = object.__new__(type(self))
        other._store(**self.__dict__ | fields)
        return other

    # -------------------------------------------------------------- immutability

    def _store(self, **fields: Any) -> None:
        for name, value in fields.items():
            self.__dict__[name] = _frozen(value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"Bags are immutable: cannot set {name!r}; build another cohort")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Bags are immutable: cannot delete {name!r}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickling forgets that arrays are read-only.
        self._store(**state)

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise TypeError(
            "Bags are ragged and not an array. Use bags.features for the (N, D) instances, "
            "bags.split(values) for one array a bag, bags.labels for the labels."
        )

    def __repr__(self) -> str:
        return "\n  ".join(_describe(self))


# ------------------------------------------------------------------ description

_LABEL_WORDS = (("positive", 1), ("negative", 0), ("unlabelled", UNKNOWN))


def _describe(bags: Bags) -> list[str]:
    """The lines of the repr."""
    counts = [(word, int((bags.labels == value).sum())) for word, value in _LABEL_WORDS]
    kinds = ", ".join(f"{n:,} {word}" for word, n in counts if n)
    lines = [
        f"Bags: {count(len(bags), 'bag')}{f' ({kinds})' if kinds else ''}, "
        f"{count(bags.n_instances, 'instance')} x {count(bags.n_features, 'feature')}, "
        f"{bags.features.dtype}{' on disk' if isinstance(bags.features, np.memmap) else ''}"
    ]
    if len(bags):
        low, middle, high = np.quantile(bags.sizes, [0, 0.5, 1])
        lines.append(f"instances a bag: {low:,.0f} to {high:,.0f}, median {middle:,g}")
    lines.append(_describe_graph(bags))
    if bags.groups is not None:
        lines.append(f"groups: {len(np.unique(bags.groups)):,}")
    known = int((bags.instance_labels != UNKNOWN).sum())
    if known:
        positive = int((bags.instance_labels == 1).sum())
        lines.append(f"instance labels: {known:,} known, {positive:,} of them positive")
    return lines


def _describe_graph(bags: Bags) -> str:
    if bags.graph is None:
        return "graph: none" + (" (positions given)" if bags.coords is not None else "")
    degree = np.diff(bags.adjacency.indptr)
    mean = degree.mean() if len(degree) else 0.0
    return (
        f"graph: {bags.graph}, {count(bags.adjacency.nnz // 2, 'edge')}, {mean:.3g} neighbours "
        f"an instance, {count(int((degree == 0).sum()), 'instance')} without"
    )


# ------------------------------------------------------------------ subsets


def _chosen(key: Any, n_bags: int) -> Int[np.ndarray, " chosen"]:
    """Bag numbers that an index asks for."""
    if isinstance(key, tuple) and len(key) == 2 and key[1] is Ellipsis:
        key = key[0]  # how scikit-learn indexes arrays of any number of axes
    if isinstance(key, slice):
        return np.arange(*key.indices(n_bags))
    if isinstance(key, tuple):
        raise IndexError(f"Bags have one axis: use a list, bags[{list(key)}]")
    index = np.asarray(key)
    if index.dtype == bool and index.ndim == 1:
        if len(index) != n_bags:
            raise IndexError(f"boolean mask: expected {n_bags} entries, found {len(index)}")
        return np.flatnonzero(index)
    if index.size == 0 and index.ndim == 1:
        index = index.astype(np.int64)  # to numpy an empty list is one of floats
    if index.dtype.kind not in "iu" or index.ndim > 1:
        raise IndexError(
            "Bags are indexed by int, slice, list of ints or boolean mask, "
            f"found {key!r}. By name: bags[bags.names == name]."
        )
    return _from_the_front(np.atleast_1d(index).astype(np.int64), n_bags)


def _from_the_front(index: Int[np.ndarray, " chosen"], n_bags: int) -> Int[np.ndarray, " chosen"]:
    """Negative numbers count from the end; those out of range raise IndexError."""
    outside = (index < -n_bags) | (index >= n_bags)
    if outside.any():
        raise IndexError(f"bag {index[outside][0]} is out of range for {n_bags} bags")
    return np.where(index < 0, index + n_bags, index)


def _rows(
    offsets: Offsets,
    chosen: Int[np.ndarray, " chosen"],
    new_offsets: Int[np.ndarray, " chosen_and_one"],
) -> slice | Int[np.ndarray, " rows"]:
    """Rows of the chosen bags; a slice (no copy) where they lie together in order."""
    if len(chosen) and (np.diff(chosen) == 1).all():
        return slice(int(offsets[chosen[0]]), int(offsets[chosen[-1] + 1]))
    shift = offsets[chosen] - new_offsets[:-1]
    return np.arange(new_offsets[-1]) + np.repeat(shift, np.diff(new_offsets))


def _take_features(features: np.ndarray, rows: slice | Int[np.ndarray, " rows"]) -> np.ndarray:
    """The rows; those of a large file go to another file, not into memory.

    The file has no name and is gone with the array. A slice stays a view of the first one.
    """
    if isinstance(rows, slice) or not isinstance(features, np.memmap):
        return features[rows]
    if len(rows) * features.shape[1] * features.itemsize <= ROOM:
        return features[rows]
    with tempfile.TemporaryFile() as file:
        shape = (len(rows), features.shape[1])
        taken = np.memmap(file, dtype=features.dtype, mode="w+", shape=shape)
        step = max(1, _CHUNK // features.shape[1])
        for start in range(0, len(rows), step):
            taken[start : start + step] = features[rows[start : start + step]]
    return taken


def _take_blocks(
    adjacency: csr_array,
    offsets: Offsets,
    chosen: Int[np.ndarray, " chosen"],
    new_offsets: Int[np.ndarray, " chosen_and_one"],
    rows: slice | Int[np.ndarray, " rows"],
) -> csr_array:
    """Diagonal blocks of the chosen bags: their rows, with the columns moved along."""
    n = int(new_offsets[-1])
    part = adjacency[rows]
    # column - start of the bag there + start of the bag here
    shift = np.repeat(new_offsets[:-1] - offsets[chosen], np.diff(new_offsets))
    columns = part.indices + np.repeat(shift, np.diff(part.indptr))
    return csr_array((part.data, columns.astype(part.indices.dtype), part.indptr), shape=(n, n))


def _frozen(value: Any) -> Any:
    """The same array (or sparse matrix) read-only, without touching the owner's flags."""
    if issparse(value):
        parts = tuple(_frozen(part) for part in (value.data, value.indices, value.indptr))
        value = csr_array(parts, shape=value.shape)
        # All our graphs are canonical; finding that out again would cost a pass over them.
        value.has_sorted_indices = value.has_canonical_format = True
    elif isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value
