"""What a power cut may leave of a recorded history, by what POSIX promises and no more.

After Pillai et al., All File Systems Are Not Created Equal (OSDI 2014): the content of a file that was not
flushed may be lost, halved or zeros; a change of names that was not flushed by its folder may be lost
or kept, in any order, but for changes of one name; a rename and an exchange happen wholly or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.storages import Operation

_Key = tuple[int, str]
_RANDOM_STATES = 6


@dataclass
class _Node:
    data: bytes | None = None
    durable: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    durable_names: dict[str, int] = field(default_factory=dict)


@dataclass
class _Change:
    """Names that get another node, or none, all at once."""

    names: Mapping[_Key, int | None]


class Disk:
    """Nodes, as the running system sees them and as they are on the platter."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._nodes: list[_Node] = [_Node()]
        self._pending: list[_Change] = []

    def apply(self, operation: Operation) -> None:
        name, arguments = operation
        getattr(self, "_" + name)(*arguments)

    def _find(self, path: str) -> tuple[_Key, int | None]:
        """Where a name is, and which node it has."""
        if path == self._root:
            return (0, ""), 0
        *folders, last = path.removeprefix(self._root + "/").split("/")
        node = 0
        for folder in folders:
            node = self._nodes[node].names[folder]
        return (node, last), self._nodes[node].names.get(last)

    def _change(self, names: Mapping[_Key, int | None]) -> None:
        for (folder, name), node in names.items():
            _set(self._nodes[folder].names, name, node)
        self._pending.append(_Change(names))

    def _new(self, path: str, node: _Node) -> int:
        self._nodes.append(node)
        self._change({self._find(path)[0]: len(self._nodes) - 1})
        return len(self._nodes) - 1

    def _make_folder(self, path: str) -> None:
        self._new(path, _Node())

    def _write(self, path: str, data: bytes, start: int | None = None) -> None:
        node = self._find(path)[1]
        if node is None:
            node = self._new(path, _Node(data=b""))
        before = self._nodes[node].data or b""
        self._nodes[node].data = data if start is None else before[:start] + data + before[start + len(data) :]

    def _fsync(self, path: str) -> None:
        node = self._nodes[self._find(path)[1] or 0]
        node.durable = node.data or b""

    def _fsync_folder(self, path: str) -> None:
        folder = self._find(path)[1]
        kept = [change for change in self._pending if all(key[0] != folder for key in change.names)]
        # Earlier changes of the same names cannot be later ones on the platter.
        for change in self._pending:
            if change not in kept:
                self._persist(self._durable(), change)
        self._pending = kept

    def _rename(self, old: str, new: str) -> None:
        (source, node), (target, _) = self._find(old), self._find(new)
        self._change({source: None, target: node})

    def _exchange(self, one: str, other: str) -> None:
        (first, one_node), (second, other_node) = self._find(one), self._find(other)
        self._change({first: other_node, second: one_node})

    def _remove(self, path: str) -> None:
        self._change({self._find(path)[0]: None})

    _remove_folder = _remove

    def _durable(self) -> list[dict[str, int]]:
        return [node.durable_names for node in self._nodes]

    @staticmethod
    def _persist(names: list[dict[str, int]], change: _Change) -> None:
        for (folder, name), node in change.names.items():
            _set(names[folder], name, node)

    def after_power_cut(self, seed: int) -> Iterator[dict[str, bytes | None]]:
        """The trees that may be found: a path to its bytes, or `None` for a folder."""
        count, chosen = len(self._pending), random.Random(seed)
        picks: list[set[int]] = [set(range(length)) for length in range(count + 1)]
        picks += [{number} for number in range(count)] + [set(range(count)) - {number} for number in range(count)]
        picks += [{number for number in range(count) if chosen.random() < 0.5} for _ in range(_RANDOM_STATES)]
        seen = set()
        for pick in picks:
            names = [dict(known) for known in self._durable()]
            for change in self._in_order(pick):
                self._persist(names, change)
            for loss in ("kept", "lost", "halved", "zeros"):
                tree = dict(self._tree(names, 0, "", loss))
                key = tuple(sorted(tree.items(), key=lambda item: item[0]))
                if key not in seen:
                    seen.add(key)
                    yield tree

    def _in_order(self, pick: set[int]) -> list[_Change]:
        """The picked changes, without those of a name whose earlier change was not picked."""
        missing: set[_Key] = set()
        chosen = []
        for number, change in enumerate(self._pending):
            if number in pick and not missing & set(change.names):
                chosen.append(change)
            else:
                missing |= set(change.names)
        return chosen

    def _tree(
        self, names: Sequence[Mapping[str, int]], folder: int, path: str, loss: str
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, number in names[folder].items():
            node, inside = self._nodes[number], f"{path}{name}"
            if node.data is None:
                yield inside, None
                yield from self._tree(names, number, inside + "/", loss)
            elif node.data == node.durable or loss == "kept":
                yield inside, node.data
            elif loss == "lost":
                yield inside, node.durable
            elif loss == "halved":
                yield inside, node.data[: len(node.data) // 2]
            else:
                yield inside, bytes(len(node.data))


def _set(names: dict[str, int], name: str, node: int | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def materialise(tree: Mapping[str, bytes | None], root: Path) -> None:
    """Writes a tree to a folder, which is made."""
    root.mkdir()
    for path, data in sorted(tree.items(), key=lambda item: item[0]):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def operation_kind(operation: Operation, root: str) -> str:
    """An operation without what differs from save to save."""
    name, arguments = operation
    parts: list[Any] = []
    for argument in arguments:
        if isinstance(argument, str):
            relative = argument.removeprefix(root).strip("/").split("/")
            parts.append("/".join("*" if part[:1] in ("_", "c") else part for part in relative))
    return f"{name} {' '.join(parts)}"
