"""Dropout masks, and attention with one, beside torch's attention."""

import math

import pytest
import torch
import torch.nn.functional as F

from windlass.model.attention import attend, dropout_mask, masked_attention


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_mask_drops_its_share_and_scales_the_rest(rate, dtype):
    torch.manual_seed(3)
    shape = (7, 251, 333)  # an odd number of elements
    mask = dropout_mask(shape, rate, torch.empty(0, dtype=dtype))
    assert (mask.shape, mask.dtype) == (shape, dtype)
    kept = mask != 0
    deviation = math.sqrt(rate * (1 - rate) / mask.numel())
    assert kept.double().mean().item() == pytest.approx(1 - rate, abs=4 * deviation + 1e-5)
    torch.testing.assert_close(mask[kept][0].item(), 1 / (1 - rate), rtol=5e-3, atol=0)
    assert len(mask.unique()) == 2
    pairs = kept[..., 1:] & kept[..., :-1]  # neighbours are independent
    assert pairs.double().mean().item() == pytest.approx((1 - rate) ** 2, abs=8 * deviation + 1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("tokens", [(16, 16), (5, 16)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_every_weight_kept_equals_torchs(heads, tokens, masked):
    torch.manual_seed(5)
    (H, K), (T, S) = heads, tokens
    q = torch.randn(2, H, T, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, K, S, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    if masked:
        seen = seen & (torch.rand(2, 1, T, S) < 0.7)
        seen[..., 0] = True
    scores = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -math.inf)
    keep = torch.ones(2, H, T, S, dtype=q.dtype)
    mine = masked_attention(q, k, v, keep, scores if masked else None)
    wanted = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    torch.testing.assert_close(mine, wanted)
    weights = torch.randn_like(wanted)
    gradients = [torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (mine, wanted)]
    torch.testing.assert_close(*gradients)


def test_attention_drops_weights():
    """Values that are one-hot give the weights back."""
    torch.manual_seed(7)
    q, k = torch.randn(2, 3, 4, 64, 8)
    v = torch.eye(64).expand(3, 4, 64, 64)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    weights = attend(q, k, v, causal=True, dropout=0.25)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], whole[kept] / 0.75)
    seen = torch.ones(64, 64, dtype=torch.bool).tril().expand_as(kept)
    assert kept[seen].float().mean().item() == pytest.approx(0.75, abs=0.02)
