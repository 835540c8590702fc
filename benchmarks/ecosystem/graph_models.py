"""A graph network of PyG. All batches are one graph, as in PyG's first example, with other labels."""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import GCNNorm

from benchmarks.zoo import Batch, Model

_NODES, _EDGES, _FEATURES, _CLASSES = 24, 60, 8, 3
_IGNORED = -100


class GCN(nn.Module):
    """Two layers.

    Args:
        normalize: whether the layers normalize the edges in each step. Otherwise `GCNNorm` has done so with the data.
    """

    def __init__(self, normalize: bool) -> None:
        super().__init__()
        self.first = GCNConv(_FEATURES, 16, normalize=normalize)
        self.second = GCNConv(16, _CLASSES, normalize=normalize)

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, labels: torch.Tensor, edge_weight: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        hidden = self.first(x, edge_index, edge_weight).relu()
        logits = self.second(hidden, edge_index, edge_weight)
        return {"loss": nn.functional.cross_entropy(logits, labels, ignore_index=_IGNORED), "logits": logits}


def _graph(generator: torch.Generator) -> Data:
    # The edges are the same in each batch.
    edges = torch.randint(0, _NODES, (2, _EDGES), generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, _CLASSES, (_NODES,), generator=generator)
    # Instead of `train_mask`, whose number of nodes would shape the step.
    labels[_NODES // 2 :] = _IGNORED
    return Data(torch.randn(_NODES, _FEATURES, generator=generator), edges, y=labels)


def _as_it_is(generator: torch.Generator) -> Batch:
    graph = _graph(generator)
    return {"x": graph.x, "edge_index": graph.edge_index, "labels": graph.y}


def _normalized(generator: torch.Generator) -> Batch:
    graph = GCNNorm()(_graph(generator))
    return {"x": graph.x, "edge_index": graph.edge_index, "edge_weight": graph.edge_weight, "labels": graph.y}


def _normalizing() -> nn.Module:
    return GCN(normalize=True)


def _without() -> nn.Module:
    return GCN(normalize=False)


GCN_NORMALIZING = Model("PyG GCN", _normalizing, _as_it_is)
GCN_NORMALIZED = Model("PyG GCN (edges normalized with the data)", _without, _normalized)
