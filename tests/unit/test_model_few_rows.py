"""Products of few rows on a CPU, against float64."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.evaluation.generate import WEIGHTS, FewRows, few_rows

pytestmark = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="needs a torch with MKL"
)


class Counted(TorchDispatchMode):
    """Counts the products of oneDNN."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 1), (2, 3), (1, 8), (64, 1)])
@torch.no_grad()
def test_products_of_few_rows_are_those_of_float64(shape: tuple[int, int], bias: bool) -> None:
    layer, whole = nn.Linear(1024, WEIGHTS // 1024 + 3, bias=bias), torch.randn(*shape, 2048)
    for x in (whole[..., 1024:], whole[..., :1024].contiguous()):
        expected = deepcopy(layer).double()(x.double())
        with Counted() as products, few_rows(layer):
            mine = layer(x)
        assert mine.shape == expected.shape and products.count == 1
        torch.testing.assert_close(mine, expected.float(), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_other_products_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, **_: "GenuineIntel")
    large, small = nn.Linear(1024, WEIGHTS // 1024), nn.Linear(1024, WEIGHTS // 1024 - 1)
    x = torch.randn(8, 1024)
    double = deepcopy(large).double()
    cases = [(large, x[:3]), (large, x.expand(9, 8, 1024)), (small, x), (double, x.double())]
    for layer, rows in cases:
        expected = layer(rows)
        with Counted() as products, FewRows():
            assert torch.equal(layer(rows), expected)
            with torch.autocast("cpu"):
                assert layer(rows).dtype in (torch.bfloat16, torch.float64)
        assert products.count == 0
    assert isinstance(few_rows(large), FewRows) and not isinstance(few_rows(small), FewRows)


@torch.no_grad()
@pytest.mark.parametrize(("vendor", "count"), [("GenuineIntel", 0), ("AuthenticAMD", 1)])
def test_one_row_on_a_cpu_of_each_vendor(
    vendor: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = f"vendor_id\t: {vendor}\n"
    monkeypatch.setattr(Path, "exists", lambda path: path == Path("/proc/cpuinfo"))
    monkeypatch.setattr(Path, "read_text", lambda path, **_: info)
    layer, x = nn.Linear(1024, WEIGHTS // 1024), torch.randn(1, 1024)
    with Counted() as products, few_rows(layer):
        mine = layer(x)
    assert products.count == count
    torch.testing.assert_close(
        mine.double(), deepcopy(layer).double()(x.double()), atol=1e-5, rtol=0
    )
