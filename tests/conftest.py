"""Eight CPU devices, and every annotated function of the package checked by jaxtyping and beartype."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("shardzoo", "beartype.beartype")
