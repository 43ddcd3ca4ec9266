"""The loader on CUDA: batches come from pinned memory onto the right device, and no other device is
touched.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


class Numbers:
    def __len__(self):
        return 100

    def read(self, indices):
        tokens = np.repeat(indices[:, None], 8, axis=1)
        return tokens, tokens.copy()


def test_batches_arrive_on_the_device_in_order():
    from windlass.data.loader import Loader
    from windlass.recipe import plan_batch

    device, plan = torch.device("cuda", torch.cuda.device_count() - 1), plan_batch(8, 4, 1, 512)
    with (
        Loader(Numbers(), plan, 0, 5, device=device) as loader,
        Loader(Numbers(), plan, 0, 5) as on_cpu,
    ):
        for _ in range(40):
            here, there = next(loader), next(on_cpu)
            for a, b in zip(here.micro, there.micro, strict=True):
                assert a.batch.tokens.device == a.batch.labels.device == device
                assert a.batch.tokens.cpu().equal(b.batch.tokens)
                assert a.batch.labels.cpu().equal(b.batch.labels)
        assert all(
            m.batch.tokens.is_pinned() and m.batch.labels.is_pinned()
            for m in loader._read(41).micro
        )
    if torch.cuda.device_count() > 1:
        assert torch.cuda.memory_allocated(0) == 0
