"""Graph networks of torch_geometric: graphs as examples, and the nodes of one graph, which cannot be taken out of it."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architecture_cases.case import EXAMPLES, Builder, Case, enlivened, normal

NODES = 5
FEATURES = 4
CLASSES = 3


def _layer(kind: str, into: int, out: int, **options: Any) -> nn.Module:  # noqa: ANN401 - a layer's own
    package = importlib.import_module("torch_geometric.nn")
    if kind.endswith("GINConv"):
        inner = nn.Sequential(nn.Linear(into, out), nn.ReLU(), nn.Linear(out, out))
        return getattr(package, kind)(inner, train_eps=True)  # type: ignore[no-any-return]
    return getattr(package, kind)(into, out, **options)  # type: ignore[no-any-return]


class Graphs(nn.Module):
    """Two layers over the nodes of all graphs as one, and a mean over each graph's."""

    def __init__(self, kind: str, **options: Any) -> None:  # noqa: ANN401 - a layer's own
        super().__init__()
        self.first = _layer(kind, FEATURES, 8, **options)
        self.second = _layer(kind, 8, 8, **options)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """Logits (N, 3) of graphs with features (N, nodes, d) and adjacency (N, nodes, nodes)."""
        graph, start, end = adjacency.nonzero(as_tuple=True)
        edges = torch.stack([graph * NODES + start, graph * NODES + end])
        hidden = self.second(self.first(x.flatten(0, 1), edges).tanh(), edges).tanh()
        logits: Tensor = self.head(hidden.unflatten(0, (-1, NODES)).mean(1))
        return logits


class Dense(Graphs):
    """The same with dense adjacency matrices."""

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """Logits (N, 3)."""
        logits: Tensor = self.head(self.second(self.first(x, adjacency).tanh(), adjacency).tanh().mean(1))
        return logits


class Nodes(nn.Module):
    """Classes of the nodes of one graph, a ring in which each reads its two predecessors."""

    def __init__(self, kind: str, **options: Any) -> None:  # noqa: ANN401 - a layer's own
        super().__init__()
        self.first = _layer(kind, FEATURES, 8, **options)
        self.second = _layer(kind, 8, CLASSES, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (nodes, 3)."""
        around = torch.arange(len(x))
        edges = torch.stack([torch.cat([around, around]), torch.cat([around.roll(1), around.roll(2)])])
        logits: Tensor = self.second(self.first(x, edges).tanh(), edges)
        return logits


def graphs(kind: str, model: type[nn.Module] = Graphs, **options: Any) -> Builder:  # noqa: ANN401 - a layer's own
    """Classes of whole graphs, which are the examples."""

    def build() -> Case:
        links = torch.rand(EXAMPLES, NODES, NODES) < 0.5
        adjacency = (links | links.transpose(1, 2)) & ~torch.eye(NODES, dtype=torch.bool)
        inputs = normal(EXAMPLES, NODES, FEATURES), adjacency.double()
        targets = torch.randint(0, CLASSES, (EXAMPLES,))
        return Case(model=enlivened(model(kind, **options)), inputs=inputs, targets=targets, task="classification")

    return build


def nodes(kind: str, **options: Any) -> Builder:  # noqa: ANN401 - a layer's own
    """Classes of the nodes of one graph: each is an example with a loss of its own, and reads its neighbours."""

    def build() -> Case:
        return Case(
            model=enlivened(Nodes(kind, **options)), inputs=normal(EXAMPLES, FEATURES),
            targets=torch.randint(0, CLASSES, (EXAMPLES,)), task="classification", alone=False,
        )  # fmt: skip

    return build


CASES: dict[str, Builder] = {
    "GCN": graphs("GCNConv"),
    "GAT": graphs("GATConv", heads=1),
    "GATv2": graphs("GATv2Conv", heads=1),
    "GIN": graphs("GINConv"),
    "GraphSAGE": graphs("SAGEConv"),
    "Graph transformer": graphs("TransformerConv", heads=1),
    "GCN, dense": graphs("DenseGCNConv", Dense),
    "GIN, dense": graphs("DenseGINConv", Dense),
    "GCN, nodes of one graph": nodes("GCNConv"),
    "GAT, nodes of one graph": nodes("GATConv", heads=1),
    "GIN, nodes of one graph": nodes("GINConv"),
}
