"""A user's own model that is given ids past its embedding: said clearly, where torch says an index or a device assertion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from windlass.errors import UserError
from windlass.parallel.parallelize import clean_name, unwrap

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from windlass.training.session import Session


class IdWatch:
    """Looks at the ids that the embeddings of a user's own model get.

    A model with `vocab` is checked before it starts and is not watched, nor is a compiled one. Looking makes a device
    wait, so `first_step_done` ends it there; on a CPU it takes microseconds beside a forward pass, and stays.
    """

    def __init__(self, session: Session):
        self.handles: list[RemovableHandle] = []
        self.on_cpu = session.ranks.device.type == "cpu"
        model = unwrap(session.model)
        if session.custom_model and not hasattr(model, "vocab") and not session.recipe.train.compile:
            for name, module in model.named_modules():
                if isinstance(module, nn.Embedding):
                    self.handles.append(module.register_forward_pre_hook(_look(clean_name(name))))

    def first_step_done(self) -> None:
        """Stop looking where that costs something."""
        while self.handles and not self.on_cpu:
            self.handles.pop().remove()


def _look(name: str) -> Any:
    def look(embedding: nn.Embedding, inputs: tuple[Any, ...]) -> None:
        ids = inputs[0] if inputs else None
        if not isinstance(ids, Tensor) or not ids.numel():
            return
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= embedding.num_embeddings:
            bad = low if low < 0 else high
            raise UserError(
                f"the model's embedding {name!r} has {embedding.num_embeddings:,} rows and was given the id {bad:,}: it needs a "
                "row for every token of the data (and for every position). A model with an attribute `vocab` is checked "
                "before the run starts"
            )

    return look
