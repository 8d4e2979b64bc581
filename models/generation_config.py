"""The sampling parameters in generation_config.json: how the makers of a checkpoint would have it drawn from.

Knows: keys and types in that file. Does not know: eos ids (config.py), legal ranges, who else may have a say
(launch/api/sampling_defaults.py).
"""

from __future__ import annotations

from pathlib import Path

from models.config import ModelConfigError, read_json_object

FILE_NAME = "generation_config.json"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def read_sampling_parameters(folder: str | Path) -> dict[str, float | int]:
    """What the file says of temperature, top_k, top_p, min_p and repetition_penalty; empty where there is no file.

    A null is the same as an absent key, and so is a top_k of -1, which older files write for "all". ``do_sample`` and
    ``max_new_tokens`` are not looked at. Raises ModelConfigError for what is no number.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        return {}
    content = read_json_object(path)
    found: dict[str, float | int] = {}
    for key in _NUMBERS:
        if (value := content.get(key)) is not None:
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ModelConfigError(f"{path}: {key!r} must be a number, not {value!r}")
            found[key] = float(value)
    if (top_k := content.get("top_k")) not in (None, -1):
        if not isinstance(top_k, int) or isinstance(top_k, bool):
            raise ModelConfigError(f"{path}: 'top_k' must be a whole number, not {top_k!r}")
        found["top_k"] = top_k
    return found
