"""callbacks of lightning-mp; imported as `lightning_mp.callbacks`."""

if __name__ != "lightning_mp.callbacks":
    raise ImportError(
        f"Passed `import {__name__}`. This folder is installed as `lightning_mp.callbacks`: "
        "write `import lightning_mp.callbacks`."
    )

__all__: list[str] = []
