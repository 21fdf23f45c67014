"""Two-way choices with the least total cost: what each costs alone, and what neighbours pay for choosing differently.

The cheapest assignment is a minimum cut of a graph whose arcs are the costs (Boykov, Veksler, Zabih, "Fast approximate
energy minimization via graph cuts", 2001), found as a maximum flow by Dinic's algorithm. It is exact, not a search.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

INFINITE = 1 << 60


class MinCut:
    """Nodes are any hashable things, made by being named. Costs are integers."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._arcs: list[list[int]] = []
        self._head: list[int] = []
        self._left: list[int] = []
        self._source, self._sink = self._node(("source",)), self._node(("sink",))

    def cost(self, node: Hashable, *, first: int, second: int) -> None:
        """What the node's two choices cost alone."""
        number = self._node(node)
        self._arc(number, self._sink, first)
        self._arc(self._source, number, second)

    def pair(self, first: Hashable, second: Hashable, cost: int) -> None:
        """Paid when the one node takes the first choice and the other node the second."""
        self._arc(self._node(first), self._node(second), cost)

    def solve(self) -> tuple[int, set[Hashable]]:
        """The least cost, and the nodes that take the second choice (as many as cost allows)."""
        total = 0
        while True:
            level = self._levels()
            if level[self._sink] < 0:
                break
            progress = [0] * len(self._arcs)
            while pushed := self._push(level, progress):
                total += pushed
        return total, {node for node, number in self._numbers.items() if level[number] < 0 and number != self._sink}

    def _node(self, node: Hashable) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self._arcs)
            self._arcs.append([])
        return self._numbers[node]

    def _arc(self, tail: int, head: int, capacity: int) -> None:
        for start, end, left in ((tail, head, capacity), (head, tail, 0)):
            self._arcs[start].append(len(self._head))
            self._head.append(end)
            self._left.append(left)

    def _levels(self) -> list[int]:
        level = [-1] * len(self._arcs)
        level[self._source] = 0
        waiting = deque([self._source])
        while waiting:
            node = waiting.popleft()
            for arc in self._arcs[node]:
                head = self._head[arc]
                if self._left[arc] > 0 and level[head] < 0:
                    level[head] = level[node] + 1
                    waiting.append(head)
        return level

    def _push(self, level: list[int], progress: list[int]) -> int:
        """Send flow along one path of the level graph; how much, 0 where there is none left."""
        path: list[int] = []
        node = self._source
        while node != self._sink:
            while progress[node] < len(self._arcs[node]):
                arc = self._arcs[node][progress[node]]
                head = self._head[arc]
                if self._left[arc] > 0 and level[head] == level[node] + 1:
                    path.append(arc)
                    node = head
                    break
                progress[node] += 1
            else:
                if not path:
                    return 0
                node = self._head[path.pop() ^ 1]
                progress[node] += 1
        flow = min(self._left[arc] for arc in path)
        for arc in path:
            self._left[arc] -= flow
            self._left[arc ^ 1] += flow
        return flow
