"""Which samples train and which judge: stratified, seeded, without parting what belongs together, checked for leaks."""

from collections import defaultdict
from itertools import combinations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from sklearn.model_selection import train_test_split

from . import UserError
from .listing import SPLITS
from .sources import Source

NEAR_BITS = 3  # of 64; difference hashes of one picture, saved again in another quality, seldom differ by more
MAX_BUCKET = 300  # samples that are compared each with each


def split(source: Source, fractions: dict[str, float], seed: int) -> None:
    """Cut the splits that the source does not define out of its training split, and look for what two splits share.

    Args:
        fractions: Share of the training split that each becomes, in the order in which they are cut.
        seed: The same seed gives the same splits.

    Raises:
        UserError: A class is too rare.
    """
    units = belonging(source.groups, source.pixel_keys)
    for name, fraction in fractions.items():
        if name in source.splits:
            continue
        train = source.splits["train"]
        try:
            taken = cut(train, source.labels, units, fraction, seed)
        except ValueError as error:
            raise UserError(
                f"No {name} split of {fraction:.0%} can be cut from {source.counts(train)} training images: {error} "
                f"Add images, take the rarest class out, or change --data.{name}_fraction."
            ) from error
        source.splits |= {"train": np.setdiff1d(train, taken), name: taken}
    source.splits = {name: source.splits[name] for name in SPLITS}
    where = {row: f"{source.names[row]} ({name})" for name, rows in source.splits.items() for row in rows.tolist()}
    equal = equal_pairs(source.pixel_keys, source.splits)
    leaks = [f"{where[one]} = {where[other]}: the same picture in two splits" for one, other in equal]
    if source.groups is not None:
        pairs = equal_pairs(source.groups, source.splits)
        leaks += [f"{where[one]}, {where[other]}: both of group {source.groups[one]}" for one, other in pairs]
    if source.dhashes is not None:
        near = sorted(set(near_pairs(source.dhashes, source.splits)) - set(equal))
        source.report += [f"warning: {where[one]} looks much like {where[other]}" for one, other in near[:10]]
        source.report += [f"warning: and {len(near) - 10:,} pairs more"] * (len(near) > 10)
        source.faults += leaks
    elif leaks:  # a published data set is as it is
        source.report.append(f"warning: {len(leaks):,} pictures are in two splits, e.g. {leaks[0]}")


def belonging(groups: list[str] | None, pixel_keys: list[str]) -> np.ndarray:
    """(N,) int64, equal for samples that must not be parted: those of one group (a patient, a video), and those with
    equal pixels."""
    keys = [f"pixels {key}" for key in pixel_keys]
    pairs = list(enumerate(keys)) + [(row, f"group {name}") for row, name in enumerate(groups or [])]
    nodes = {name: len(keys) + number for number, name in enumerate(dict.fromkeys(name for _, name in pairs))}
    rows, columns = zip(*[(row, nodes[name]) for row, name in pairs], strict=True) if pairs else ((), ())
    size = len(keys) + len(nodes)
    graph = csr_array((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(size, size))
    return connected_components(graph, directed=False)[1][: len(keys)].astype(np.int64)


def cut(train: np.ndarray, labels: np.ndarray, units: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """The samples of `train` that move to another split: a share of each class, of whole units alone.

    Args:
        train: (M,) int64 samples to choose from.
        labels: Of all samples: (N,) int64 class indices, (N, K) uint8 for multi-label, or (N,) float32 numbers.
        units: (N,) int64; samples with the same number stay together.
        fraction: Share that moves.
        seed: The same seed gives the same choice.

    Raises:
        ValueError: A class is too rare to be in both.
    """
    if labels.dtype.kind == "f":
        labels = np.zeros(len(labels), dtype=np.int64)
    if labels.ndim == 1 and len(np.unique(units[train])) == len(train):
        return np.sort(train_test_split(train, test_size=fraction, stratify=labels[train], random_state=seed)[1])
    labels = labels if labels.ndim == 2 else np.eye(labels.max() + 1, dtype=np.uint8)[labels]
    names, unit_of = np.unique(units[train], return_inverse=True)
    counts = np.zeros((len(names), labels.shape[1] + 1), dtype=np.int64)
    np.add.at(counts, unit_of, np.column_stack([labels[train], np.ones(len(train), dtype=np.uint8)]))
    if not 0 < fraction < 1:
        raise ValueError(f"{fraction} is no share between 0 and 1.")
    moved = stratify(counts, fraction, np.random.default_rng(seed))
    taken, total = counts[moved].sum(axis=0), counts.sum(axis=0)
    if poor := [column for column in np.flatnonzero(total[:-1]) if not 0 < taken[column] < total[column]]:
        raise ValueError(f"Of {len(poor)} classes, all samples belong together, so they can't be in both.")
    return np.sort(train[np.isin(unit_of, np.flatnonzero(moved))])


def stratify(counts: np.ndarray, fraction: float, random: np.random.Generator) -> np.ndarray:
    """(U,) bool: which units move, so that a share of each column moves. The rarest column is served first, each unit
    going where most of it is still wanted (iterative stratification: doi:10.1007/978-3-642-23808-6_10).

    Args:
        counts: (U, K + 1) int64 samples of each class, and of all, in each unit.
    """
    wanted = np.stack([counts.sum(axis=0) * (1 - fraction), counts.sum(axis=0) * fraction])
    moved, free = np.zeros(len(counts), dtype=bool), random.permutation(len(counts))
    while len(free):
        left = (counts[free] > 0).sum(axis=0)
        column = int(np.argmin(np.where(left > 0, left, len(counts) + 1)))
        having = counts[free, column] > 0
        for unit in sorted(free[having], key=lambda unit: -counts[unit, column]):  # large ones while there is room
            keep, move = wanted[:, column]
            moved[unit] = move > keep or (move == keep and wanted[1, -1] > wanted[0, -1])
            wanted[int(moved[unit])] -= counts[unit]
        free = free[~having]
    return moved


def equal_pairs(keys: list[str], splits: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Pairs of samples in two splits that have equal keys; one pair for each two splits and each key."""
    seen: dict[str, dict[str, int]] = defaultdict(dict)
    for name, rows in splits.items():
        for row in rows.tolist():
            seen[keys[row]].setdefault(name, row)
    return [pair for places in seen.values() for pair in combinations(places.values(), 2)]


def near_pairs(dhashes: np.ndarray, splits: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Pairs of samples in two splits whose difference hashes, (N,) uint64, differ in at most `NEAR_BITS` bits.

    Two such hashes agree in at least one of `NEAR_BITS + 1` bands, so only samples with an equal band are compared.
    """
    rows = np.concatenate(list(splits.values()))
    split_of = np.repeat(np.arange(len(splits)), [len(items) for items in splits.values()])
    busy = ~np.isin(dhashes[rows], np.array([0, 2**64 - 1], dtype=np.uint64))  # a plain picture has no shape to compare
    rows, split_of = rows[busy], split_of[busy]
    pairs = set()
    width = -(-64 // (NEAR_BITS + 1))
    for band in range(NEAR_BITS + 1):
        values = dhashes[rows] >> np.uint64(band * width) & np.uint64(2**width - 1)
        buckets = defaultdict(list)
        for position, value in enumerate(values.tolist()):
            buckets[value].append(position)
        for bucket in buckets.values():
            for one, other in combinations(bucket[:MAX_BUCKET], 2):
                bits = int(dhashes[rows[one]] ^ dhashes[rows[other]]).bit_count()
                if bits <= NEAR_BITS and split_of[one] != split_of[other]:
                    pairs.add((int(rows[one]), int(rows[other])))
    return sorted(pairs)
