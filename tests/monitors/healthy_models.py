"""Healthy runs of real models under every precision, which must raise no alarm."""

from tests.monitors.generative_models import GENERATIVE_MODELS
from tests.monitors.language_models import LANGUAGE_MODELS
from tests.monitors.other_models import OTHER_MODELS
from tests.monitors.running import PRECISIONS, Learner, Outcome, train

__all__ = ["MODELS", "PRECISIONS", "healthy_run"]

MODELS: dict[str, type[Learner]] = {
    **LANGUAGE_MODELS,
    **OTHER_MODELS,
    **GENERATIVE_MODELS,
}


def healthy_run(model: str, precision: str, steps: int, every: int | None = None) -> Outcome:
    """Train one of `MODELS` under all monitors.

    Args:
        model: A key of `MODELS`.
        precision: A key of `PRECISIONS`.
        steps: Number of training steps.
        every: Steps between two samples of a monitor; `None` for the defaults.
    """
    often = {} if every is None else {"every_n_steps": every}
    module = MODELS[model](steps)
    max_steps = steps * module.optimizers_per_batch
    plugin = PRECISIONS[precision]()
    return train(module, plugin, often=often, max_epochs=-1, max_steps=max_steps)
