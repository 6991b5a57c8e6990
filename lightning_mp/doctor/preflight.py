"""The command `lightning-mp preflight`; it imports what it needs when it runs."""

__all__ = ["preflight"]


def preflight(config: str | None = None, steps: int = 4, dirpath: str | None = None) -> None:
    """Say which modules half precision hurts, and which settings mend them, by a few batches.

    The first batches of the run are compared in half and in fp32, module by module, with
    `PrecisionPreflight`, on one device of this machine; only the page is written, if it has a
    folder. The exit code is 1 where half precision adds errors that matter.

    Args:
        config: YAML file of a run, as for `lightning-mp fit --config`.
        steps: Batches that are looked at.
        dirpath: Folder to write the page `preflight.html` to.
    """
    if config is None:
        raise SystemExit("lightning-mp preflight: pass the YAML file of a run by `--config`.")
    from lightning_mp.callbacks.precision_preflight import PrecisionPreflight
    from lightning_mp.doctor.started_run import start

    try:
        callback = PrecisionPreflight(steps=steps, dirpath=dirpath, stops=True)
        run = start(
            config,
            callback=callback,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"lightning-mp preflight: {error}") from None
    if run.error is not None:
        raise SystemExit(f"lightning-mp preflight: the run could not start: {run.error}")
    if callback.result is None:
        reason = callback.failure or "the run has fewer batches than that"
        raise SystemExit(f"lightning-mp preflight: {reason}")
    print(callback.text)
    if callback.path is not None:
        print(f"\nThe page is {callback.path}.")
    if not callback.result.is_clean:
        raise SystemExit(1)
