"""A small model with everything that makes wrapping hard."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 37


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (t.view(B, T, 2, D // 2).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, dropout)
        self.norm2, self.drop = nn.RMSNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Toy(nn.Module):
    """Tied head, biases, sizes that no world divides, a buffer and a frozen parameter."""

    def __init__(self, width: int = 10, layers: int = 3, dropout: float = 0.0, tied: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
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


def toy(seed: int = 0, dtype: torch.dtype = torch.float64, **how: object) -> Toy:
    """The model with values that `seed` alone decides."""
    torch.manual_seed(seed)
    return Toy(**how).to(dtype)  # type: ignore[arg-type]


def micro_batch(
    number: int, valid: bool = True, rows: int = 2, length: int = 7
) -> tuple[Tensor, Tensor]:
    """Tokens and ragged labels of micro-batch `number`; not `valid`: no label counts."""
    draw = torch.Generator().manual_seed(1000 + number)
    tokens, labels = torch.randint(0, VOCAB, (2, rows, length), generator=draw)
    keep = torch.rand(rows, length, generator=draw) < 0.3 + 0.6 * (number % 3) / 2
    return tokens, labels.where(keep & torch.tensor(valid), torch.tensor(-100))
