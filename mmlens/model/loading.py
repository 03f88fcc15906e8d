"""Finding a model: an embedded name, a local folder, or a hub id."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from mmlens.errors import ModelNotFoundError, OptionError, UnknownFamilyError, closest
from mmlens.families import FAMILIES


def embedded_models() -> dict[str, Path]:
    """Names and folders of the models that ship with the package."""
    toys = Path(str(resources.files("mmlens"))) / "toys"
    return {p.name: p for p in sorted(toys.iterdir()) if (p / "config.json").exists()}


def resolve(name: str) -> tuple[str, bool]:
    """What to hand to `from_pretrained`, and whether it lies on this disk."""
    embedded = embedded_models()
    if name in embedded:
        return str(embedded[name]), True
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelNotFoundError(
                f"folder {name!r} holds no config.json",
                expected="a folder written by save_pretrained: config.json, model.safetensors, the processor's files",
                fix="point at the folder that holds config.json",
            )
        return name, True
    if folder.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelNotFoundError(
            f"{name!r} is no embedded model and no folder",
            expected=f"one of {', '.join(embedded)}, a local folder, or a hub id 'owner/name'; "
            f"closest: {closest(name, embedded)}",
            fix="check the spelling; `mmlens models` lists what ships with mmlens",
        )
    return name, False


def load(name: str, *, dtype: Any, device_map: Any, revision: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    """The Hugging Face model (evaluation mode, SDPA) and its processor."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    source, local = resolve(name)
    options = {} if local else {"revision": revision}
    if local and revision is not None:
        raise ModelNotFoundError(
            f"revision={revision!r} for {name!r}, which lies on this disk",
            expected="a revision only with a hub id",
            fix="drop revision=",
        )
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loadable(name, source, local, error) from error
    check_architecture(name, config)
    try:
        model, report = AutoModelForImageTextToText.from_pretrained(
            source,
            output_loading_info=True,
            dtype=dtype,
            device_map=device_map,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
            **options,
        )
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise _not_loadable(name, source, local, error) from error
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise ModelNotFoundError(
            f"{name!r} lacks {len(missing)} weights, {missing[0]} among them",
            expected="every weight of the architecture; missing ones would be random",
            fix="save or download the checkpoint again",
        )
    return model.eval(), processor


def load_parts(name: str, *, revision: str | None = None) -> tuple[Any, Any]:
    """Config and processor of a model, no weights: enough to encode prompts and to know every token's place."""
    from transformers import AutoConfig, AutoProcessor

    source, local = resolve(name)
    options = {} if local else {"revision": revision}
    try:
        config = AutoConfig.from_pretrained(source, **options)
        check_architecture(name, config)
        return config, AutoProcessor.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loadable(name, source, local, error) from error


def as_dtype(dtype: Any) -> Any:
    """A torch dtype from one or its name; "auto" stays."""
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if found != "auto" and not isinstance(found, torch.dtype):
        raise OptionError(f"dtype={dtype!r}", expected="'auto', a torch dtype or its name", fix="dtype='bfloat16'")
    return found


def as_device(device: Any) -> Any:
    """A torch device that this machine has."""
    import torch

    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise OptionError(
            f"device={device!r}: {str(error).splitlines()[0]}", expected="a device of this machine", fix="device='cpu'"
        ) from error
    return found


def shown_name(name: str) -> str:
    """What a result calls the model: a folder by its last part, so that results do not depend on where it lies."""
    return Path(name).name if Path(name).is_dir() else name


def check_architecture(name: str, config: Any) -> None:
    """Refuse a checkpoint of no known family before its weights are read."""
    known = [a for family in FAMILIES for a in family.architectures]
    named = list(getattr(config, "architectures", None) or [])
    if not set(named) & set(known):
        parts = [p for p in ("text_config", "vision_config") if getattr(config, p, None) is None]
        missing = f" and no {' and no '.join(parts)}" if parts else ""
        raise UnknownFamilyError(
            f"{name!r} is a {', '.join(named) or config.model_type} (model_type {config.model_type!r}){missing}",
            expected=f"one of {', '.join(known)}",
            fix="see docs/families.md for how to describe a new family in one file",
        )


def _not_loadable(name: str, source: str, local: bool, error: Exception) -> Exception:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if local:
        kind = (
            json.loads((Path(source) / "config.json").read_text() or "{}").get("model_type")
            if _is_json(source)
            else None
        )
        if (kind is not None and "model_type" in str(error)) or "does not recognize this architecture" in str(error):
            return UnknownFamilyError(
                f"{name!r} has model_type {kind!r}, which transformers does not know",
                expected=f"one of {', '.join(a for f in FAMILIES for a in f.architectures)}",
                fix="see docs/families.md; a newer transformers may know it",
            )
        return ModelNotFoundError(
            f"folder {name!r} cannot be loaded: {first}",
            expected="config.json, model.safetensors and the processor's files, all whole",
            fix="save it again with model.save_pretrained(folder) and processor.save_pretrained(folder)",
        )
    return ModelNotFoundError(
        f"hub id {name!r} cannot be loaded: {first}",
        expected="a hub id that exists and can be reached, or is in the local cache",
        fix="check the id and the connection (HF_HUB_OFFLINE=1 forbids it); `mmlens models` lists what needs neither",
    )


def _is_json(folder: str) -> bool:
    try:
        json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return True


def fingerprint(model: Any) -> str:
    """16 hex digits that tell weights apart: name, shape, dtype and a few values of every tensor, hashed."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if tensor.is_meta:  # offloaded: only its shape is at hand
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            continue
        flat = tensor.detach().reshape(-1)
        ends = torch.cat([flat[:4], flat[flat.numel() // 2 :][:4], flat[-4:]]).float().cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{ends.tolist()}".encode())
    return digest.hexdigest()[:16]
