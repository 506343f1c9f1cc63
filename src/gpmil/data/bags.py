"""Bags: a cohort of bags of instances, ragged and immutable.

All instances lie in one (N, D) array; bag b is rows ``offsets[b]:offsets[b + 1]``.  Labels,
names, groups (patients), positions, instance labels and the neighbour graph travel along, and
every subset is a ``Bags`` again, so scikit-learn can split one as if it were an array.
Arguments are checked in ``gpmil.data.checks`` and ``gpmil.data.positions``.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import numpy as np
from jaxtyping import Float
from scipy.sparse import csr_array

from gpmil.data import annotated, checks, extraction, frames, positions, rows, summary
from gpmil.data.checks import PerBag, PerInstance, listed, offsets_of
from gpmil.data.classes import Labels
from gpmil.data.digests import digest
from gpmil.data.neighbours import Coords, Offsets, bag_index
from gpmil.data.positions import Steps


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
        Bag b is rows ``offsets[b]:offsets[b + 1]``; at least one row per bag.
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
    step : number, pair, one per bag, or (B, k)
        Distance of neighbouring patches.  A tuple of k numbers is one per axis; a list or array
        of B numbers one per bag (the type decides only where k = B, and that is said).
        None: inferred from the coordinates where the graph needs it, and said.
    graph : "grid4", "grid8", "radius", "knn", "chain" or None
        How coordinates make neighbours, see ``gpmil.data.graphs``.
    metadata : dict, optional
        A few facts that travel along, such as ``{"encoder": "uni_v1", "magnification": 20}``;
        `facts` are those that models compare.
    edges : one array per bag, optional
        (E, 2) local indices or (E, 3) with weights; coordinates then serve maps only.
    positive, negative, exclude : optional
        The labels that count as 1, as 0 and as unlabelled: a value, several ("a,b" or a list),
        or a comparison such as ">=2".  Of two classes one is enough, of more each must be said.
    radius, n_neighbors
        For graph="radius" (default 1.5 steps) and graph="knn".

    Attributes
    ----------
    features, offsets, labels, names, groups, coords, instance_labels, adjacency, step, graph
        As given, checked and encoded; labels are 0, 1 or -1, `class_names` what they are called.

    Examples
    --------
    >>> bags = Bags(np.arange(10.0).reshape(5, 2), [0, 3, 5], labels=[1, 0], names=["a", "b"],
    ...             coords=[[0, 0], [0, 1], [1, 1], [5, 5], [6, 5]], step=1, graph="grid4")
    >>> bags
    Bags: 2 bags (1 positive, 1 negative), 5 instances x 2 features, float64
      instances per bag: 2 to 3, median 2.5
      graph: grid4, 3 edges, 1.2 neighbours per instance, 0 instances without
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
        self._store_instances(features, offsets, names)
        self._store_labels(labels, instance_labels, positive, negative, exclude)
        self._store_positions(coords, step)
        if adjacency is not None:
            adjacency, graph = positions.as_adjacency(adjacency, self.offsets), graph or "edges"
            self._store(adjacency=adjacency, graph=graph)
        elif edges is not None:
            adjacency = positions.graph_from_edges(edges, self.offsets, self.names)
            self._store(adjacency=adjacency, graph="edges")
        else:
            self._store_graph(graph, radius, n_neighbors)
        self._store(groups=checks.as_groups(groups, self.names), _metadata=dict(metadata or {}))
        if not isinstance(self.features, np.memmap):
            self.check_finite()

    # -------------------------------------------------------------- arguments, checked

    def _store_instances(self, features: Any, offsets: Any, names: Any) -> None:
        features = checks.as_features(features, "features")
        offsets = checks.as_offsets(offsets, len(features))
        names = checks.as_names(names, len(offsets) - 1)
        checks.require_instances(offsets, names)
        self._store(features=features, offsets=offsets, names=names)

    def _store_labels(
        self, labels: Any, instance_labels: Any, positive: Any, negative: Any, exclude: Any
    ) -> None:
        labels, class_names = checks.encode_labels(labels, len(self), positive, negative, exclude)
        instance_labels = checks.encode_instance_labels(instance_labels, self.n_instances)
        checks.mention_contradictions(instance_labels, labels, self.offsets, self.names)
        self._store(labels=labels, class_names=class_names, instance_labels=instance_labels)

    def _store_positions(self, coords: Any, step: Any) -> None:
        coords = positions.as_coords(coords, self.offsets, self.names)
        self._store(coords=coords, step=positions.as_step(step, self.names, coords))

    def _store_graph(self, graph: str | None, radius: Any, n_neighbors: int) -> None:
        adjacency, graph, step = positions.graph_from_coords(
            self.coords, self.offsets, self.names, graph, self.step, radius, n_neighbors
        )
        self._store(adjacency=adjacency, graph=graph, step=step)

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
        **rest: Any,
    ) -> "Bags":
        """A cohort from one (n_b, D) array per bag.

        `coords`, `edges` and `instance_labels` are likewise one array per bag: (n_b, k), (E, 2) or
        (E, 3), and (n_b,) or None.  All else is as in the constructor, and so is the rest:
        `radius`, `n_neighbors`, `metadata`, `negative`, `exclude`.

        Examples
        --------
        >>> slides = [np.ones((4, 3)), np.zeros((2, 3))]
        >>> positions = [[(0, 0), (0, 256), (256, 0), (256, 256)], [(0, 0), (256, 0)]]
        >>> bags = Bags.from_arrays(slides, ["tumour", "benign"], coords=positions, step=256,
        ...                         positive="tumour")
        >>> bags.labels, bags.class_names, bags.adjacency.nnz // 2
        (array([1, 0]), ('benign', 'tumour'), 5)
        """
        features, sizes, names = checks.join_features(arrays, names)
        return cls(
            features,
            offsets_of(sizes),
            labels=labels,
            names=names,
            groups=groups,
            coords=positions.join_coords(coords, sizes, names),
            instance_labels=checks.join_instance_labels(instance_labels, sizes, names),
            step=step,
            graph=graph,
            adjacency=None,  # `edges` say it bag by bag
            edges=edges,
            positive=positive,
            **rest,
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
        **rest: Any,
    ) -> "Bags":
        """A cohort from a table with one row per instance.

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
        step, graph, positive, **rest
            As in the constructor; the rest: radius, n_neighbors, metadata, negative, exclude.
        """
        given = frames.read(df, bag, label, features, coords, group, instance_label)
        # Rows change places, so no graph is taken: named here, Python refuses it in `rest`.
        none: dict[str, Any] = {"adjacency": None, "edges": None}
        return cls(**given, **none, step=step, graph=graph, positive=positive, **rest)

    @classmethod
    def from_anndata(
        cls,
        data: Any,
        slide: str | None = None,
        label: str | None = "label",
        features: str | None = None,
        coords: str | None = "spatial",
        group: str | Literal[False] | None = None,
        instance_label: str | Literal[False] | None = None,
        **rest: Any,
    ) -> "Bags":
        """A cohort from an AnnData with one row per patch, or a mapping from slides to AnnData.

        As LazySlide's `wsi.fetch.features_anndata` gives them, or tables of SpatialData. `slide`,
        `label`, `group` (the patient) and `instance_label` are columns of `obs`. Those that are not
        named are guessed, and guesses are logged; of a mapping the key is the slide. `group=False`:
        no column is. `features` (default `X`) and `coords` are names in `obsm`. `uns["tile_spec"]`
        tells the step; the rest is as in the constructor.
        """
        given = annotated.read(data, slide, label, features, coords, group, instance_label)
        rest["metadata"] = given.pop("metadata", {}) | dict(rest.get("metadata") or {})
        return cls(**given | {"graph": "grid4"} | rest, adjacency=None, edges=None)

    def to_anndata(self, predictions: Any = None, into: Any = None) -> Any:
        """All patches as an AnnData: `X`, `obs`, `obsm["spatial"]` and the graph.

        `predictions` (of `predict_all`, `predict_instances`, or a table with one row per patch)
        become columns of `obs`, "gpmil_...". They are added to `into`, what `from_anndata` was
        given, if it is there.
        """
        return annotated.write(self, predictions, into)

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
        return bag_index(self.offsets)

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
        """Cut anything with one row per instance (N, ...) into one piece per bag."""
        if len(values) != self.n_instances:
            raise ValueError(
                f"split: expected one row per instance, {self.n_instances} in all, "
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
        bad = rows.count_not_finite(self.features)
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
        found = np.array([digest(own) for own in self.split(self.features)], dtype=np.int64)
        if not isinstance(self.features, np.memmap):
            self._store(_digests=found)
        return found

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, key: Any) -> "Bags":
        """The chosen bags as Bags: an int, slice, list or array of ints, or boolean mask."""
        return self._take(rows.chosen(key, len(self)))

    def __iter__(self) -> Iterator["Bags"]:
        return (self[b] for b in range(len(self)))

    def _take(self, chosen: rows.Chosen) -> "Bags":
        offsets = offsets_of(self.sizes[chosen])
        here = rows.rows_of(self.offsets, chosen, offsets)
        return self._changed(
            features=rows.take_features(self.features, here),
            offsets=offsets,
            labels=self.labels[chosen],
            names=self.names[chosen],
            groups=None if self.groups is None else self.groups[chosen],
            coords=None if self.coords is None else self.coords[here],
            instance_labels=self.instance_labels[here],
            adjacency=rows.take_blocks(self.adjacency, self.offsets, chosen, offsets, here),
            step=None if self.step is None else self.step[chosen],
            _digests=None if self._digests is None else self._digests[chosen],
        )

    def in_memory(self) -> "Bags":
        """The same bags; features in a file are read into memory, for whoever needs them again."""
        if not isinstance(self.features, np.memmap):
            return self
        return self._changed(features=np.array(self.features))

    def with_labels(self, found: Labels, groups: Any = None) -> "Bags":
        """The same bags with other labels, and other groups where they are given."""
        checks.mention_contradictions(self.instance_labels, found.values, self.offsets, self.names)
        return self._changed(
            labels=found.values,
            class_names=found.names,
            groups=self.groups if groups is None else checks.as_groups(groups, self.names),
            _metadata=self._metadata | {"classes": found.classes},
        )

    def with_groups(self, groups: Any) -> "Bags":
        """The same bags, of other groups."""
        return self._changed(groups=checks.as_groups(groups, self.names))

    def with_instance_labels(self, instance_labels: Any) -> "Bags":
        """The same bags with other labels of instances, (N,): 0, 1, or -1 where unknown."""
        known = checks.encode_instance_labels(instance_labels, self.n_instances)
        checks.mention_contradictions(known, self.labels, self.offsets, self.names)
        return self._changed(instance_labels=known)

    def with_features(self, features: Any) -> "Bags":
        """The same bags with other features, one row per instance."""
        features = checks.as_features(features, "features", self.n_instances)
        return self._changed(features=features, _digests=None, _finite=False)

    def with_digests(self, digests: PerBag) -> "Bags":
        """The same bags, with what was seen when their file was made: it holds finite values."""
        return self._changed(_digests=digests, _finite=True)

    def _changed(self, **fields: Any) -> "Bags":
        other = object.__new__(type(self))
        other._store(**self.__dict__ | fields)
        return other

    def _store(self, **fields: Any) -> None:
        for name, value in fields.items():
            self.__dict__[name] = checks.frozen(value)

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
            "bags.split(values) for one array per bag, bags.labels for the labels."
        )

    def __repr__(self) -> str:
        return "\n  ".join(summary.describe(self))
