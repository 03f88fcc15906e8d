"""Shapes checked by beartype, no network, one thread; shared models."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

install_import_hook("mmlens", "typecheck.checker")

import jaxtyping  # noqa: E402
import pytest  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("mmlens", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("mmlens")


@pytest.fixture
def as_users():
    """Without type checks, as in a user's process: what wrong types really meet."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(params=["qwen3-vl", "llava-1.5"])
def family(request):
    """Name of a tiny family: a packed tower with DeepStack, and a plain one. Suites over all families say so."""
    return request.param


@pytest.fixture
def wrapped(family):
    """An open HookedVLM of a fresh tiny model."""
    from mmlens import HookedVLM

    with HookedVLM.from_model(*tiny.FAMILIES[family]()) as vlm:
        yield vlm


@pytest.fixture(scope="session")
def toy():
    """The embedded model, open for the whole session; tests leave it as they found it."""
    from mmlens import HookedVLM

    return HookedVLM.from_pretrained("toy-qwen3-vl")


@pytest.fixture(scope="session")
def scenes():
    """The shapes task."""
    from mmlens import load_task

    return load_task("scenes/image")
