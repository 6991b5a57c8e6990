"""The command `lightning-mp preflight`; heavy imports happen when it runs."""

from typing import Any

__all__ = ["preflight"]


def preflight(settings: dict[str, Any], steps: int = 4, dirpath: str | None = None) -> None:
    """Name the modules that half precision hurts, and print settings that fix them.

    `PrecisionPreflight` compares the first batches of the run in half precision and in fp32, module
    by module, on one device of this machine. The exit code is 1 if half precision adds errors that
    matter.

    Args:
        settings: The config of the run.
        steps: Number of batches to compare.
        dirpath: Folder for the page `preflight.html`; without it, no file is written.
    """
    from lightning_mp.callbacks.precision_preflight import PrecisionPreflight
    from lightning_mp.doctor.started_run import start

    callback = PrecisionPreflight(steps=steps, dirpath=dirpath, stops=True)
    run = start(settings, callback=callback, num_sanity_val_steps=0, limit_val_batches=0)
    if run.error is not None:
        raise ValueError(f"the run fails: {run.reason}{run.place}")
    # A later batch may fail, such as of weights that fp16 states have made NaN.
    if callback.failure is not None or callback.result is None:
        failure = callback.failure or "the run has no batch."
        raise ValueError(failure.removesuffix(" Training continues."))
    print("\n".join([callback.text, *(f"\nNote: {note}" for note in run.notes)]))
    if callback.path is not None:
        print(f"\nThe page is {callback.path}.")
    elif dirpath is not None:
        raise OSError(f"the page could not be written to {dirpath!r}.")
    if not callback.result.is_clean:
        raise SystemExit(1)
