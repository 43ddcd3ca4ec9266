"""A small model with everything that makes wrapping hard."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 37


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # the mean of the tokens so far, and one by one
        x = x + self.norm1(x).cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(-1)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Toy(nn.Module):
    """Tied head, biases, sizes that no world divides, a buffer and a frozen parameter."""

    def __init__(self, width: int = 10, layers: int = 3, tied: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.shift * self.frozen
        for block in self.layers:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def toy(seed: int = 0, **how: object) -> Toy:
    """The model with values that `seed` alone decides."""
    torch.manual_seed(seed)
    return Toy(**how)  # type: ignore[arg-type]


def micro_batch(
    number: int, valid: bool = True, rows: int = 2, length: int = 7
) -> tuple[Tensor, Tensor]:
    """Tokens and ragged labels of micro-batch `number`; not `valid`: no label counts."""
    draw = torch.Generator().manual_seed(1000 + number)
    tokens, labels = torch.randint(0, VOCAB, (2, rows, length), generator=draw)
    keep = torch.rand(rows, length, generator=draw) < 0.3 + 0.6 * (number % 3) / 2
    return tokens, labels.where(keep & torch.tensor(valid), torch.tensor(-100))
