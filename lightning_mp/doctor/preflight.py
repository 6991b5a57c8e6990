"""The command `lightning-mp preflight`; heavy imports happen when it runs."""

__all__ = ["preflight"]


def preflight(config: list[str] | None = None, steps: int = 4, dirpath: str | None = None) -> None:
    """Name the modules that half precision hurts, and print settings that fix them.

    `PrecisionPreflight` compares the first batches of the run in half precision and in fp32, module
    by module, on one device of this machine. The exit code is 1 if half precision adds errors that
    matter.

    Args:
        config: YAML files of a run, as for `lightning-mp fit --config`; repeat the option.
        steps: Number of batches to compare.
        dirpath: Folder for the page `preflight.html`; without it, no file is written.
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
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"lightning-mp preflight: {error}") from None
    if run.error is not None:
        raise SystemExit(f"lightning-mp preflight: the run cannot start: {run.error}")
    if callback.result is None:
        reason = callback.failure or f"the run has fewer than {steps} batches."
        raise SystemExit(f"lightning-mp preflight: {reason}")
    print("\n".join([callback.text, *(f"\nNote: {note}" for note in run.notes)]))
    if callback.path is not None:
        print(f"\nThe page is {callback.path}.")
    if not callback.result.is_clean:
        raise SystemExit(1)
