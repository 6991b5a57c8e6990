"""Names in `roles` that match nothing raise after the first step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import GradientCache, InfCLStrategy
from tests.processes import run_ranks
from tests.strategies.models import TinyCLIP, loader, make_trainer

ROWS, TABLE = torch.ones(8, 3), torch.ones(8, 3)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, table: Tensor | None = None) -> dict[str, Tensor]:
        x = x if table is None else x + table.mean(0)
        return {"features": self.linear(x), "hidden": x}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = Tower(), Tower()


def serve(towers: str = "visual text", **settings: Any) -> None:
    model, cache = Model(), GradientCache(micro_batch_size=3, **settings)
    with cache.serving(model, ["visual", "text"]):
        for name in towers.split():
            getattr(model, name)(ROWS, **({"table": TABLE} if name == "text" else {}))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"tabel": "whole"}, r"`GradientCache\(roles={'tabel': 'whole'}\)`.*mean 'table'\?"),
        ({"x": "rows", "p": "whole", "table": "whole"}, r"{'p': 'whole'}\).*\['x', 'table', 'feat"),
        ({"hiden": "left out"}, r"No output of a tower .*Did you mean 'hidden'\?"),
        ({"table": "left out"}, "No output of a tower that was called is named 'table'"),
        ({"hidden": "row numbers"}, "No argument of a tower that was called and no field of the"),
    ],
)
def test_unmatched_name_raises_after_all_towers_were_called(
    roles: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        serve(roles=roles)
    serve("visual", roles=roles)  # the other tower may have this name


def test_names_of_arguments_and_outputs_are_accepted() -> None:
    serve(roles={"x": "rows", "table": "whole", "hidden": "left out"})
    # `table` is a parameter of a tower that no call has passed yet.
    model, cache = Model(), GradientCache(micro_batch_size=3, roles={"table": "whole"})
    with cache.serving(model, ["visual", "text"]):
        model.visual(ROWS)
        model.text(ROWS)


def test_name_of_a_tower_without_a_list_is_refused() -> None:
    cache = GradientCache(micro_batch_size=3)
    with pytest.raises(ValueError, match=r"a list of names: \['visual'\]"):
        cache.serving(Model(), "visual").__enter__()


def test_check_raises_for_unmatched_names_without_serving() -> None:
    cache = GradientCache(micro_batch_size=3, roles={"tabel": "whole"})
    cache.check()  # no tower was called
    cache.call(Tower(), ROWS)["features"].sum().backward()
    with pytest.raises(ValueError, match=r"roles={'tabel': 'whole'}"):
        cache.check()


class OnOneRank(TinyCLIP):
    """Only the second rank passes a keyword that the signature of the tower does not name."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.text = TakesAny(self.text)

    def features(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        image, text = batch
        others = {"prompt": torch.ones(1, 12)} if self.global_rank else {}
        return self.head(self.visual(image)), self.text(text, **others)


class EmptyAtFirst(TinyCLIP):
    """The second rank has no rows in the first step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, text = (x[:0] if self.global_rank and not batch_idx else x for x in batch)
        return self.visual(image).sum() + self.text(text).sum()


class TakesAny(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.tower(sum(others.values(), x))


def _train(rank: int) -> dict[str, str]:
    said = {}
    for name, model in (("prompt", OnOneRank), ("promt", OnOneRank), ("input", EmptyAtFirst)):
        role = "rows" if name == "input" else "whole"
        trainer = make_trainer(
            InfCLStrategy(micro_batch_size=5, roles={name: role}), devices=2, max_steps=2
        )
        try:
            trainer.fit(model(), loader(48, 12))
        except ValueError as error:
            said[name] = str(error)
        else:
            said[name] = f"{trainer.global_step} steps"
    return said


@pytest.mark.distributed
def test_all_ranks_raise_for_an_unmatched_name_or_none() -> None:
    for said in run_ranks(_train, 2):
        assert said["prompt"] == said["input"] == "2 steps"
        assert said["promt"].startswith("Passed `InfCLStrategy(roles={'promt': 'whole'})`.")
