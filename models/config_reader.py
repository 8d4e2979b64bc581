"""Typed reads of a parsed config.json.

Knows: that a null counts as absent, how a wrong value is refused, where the text part of a model for images stands.
Does not know: any model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Option -> the values under which it changes nothing here, and what it would ask for otherwise.
Neutral = Mapping[str, tuple[tuple[object, ...], str]]
_HUGE = 1e30  # no number of a model is larger; NaN and infinity, which Python's JSON accepts, are not smaller


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed reads of a parsed JSON object; a null counts as absent. Every read raises ValueError naming the key."""

    config: Mapping[str, Any]

    def size(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A number of things: from 1 to ``most``."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"the key {key!r} is missing")
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key!r} must be a positive integer, not {value!r}")
        if value > most:
            raise ValueError(f"{key!r} must be at most {most}, not {value}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -_HUGE < value < _HUGE:
            raise ValueError(f"{key!r} must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{key!r} must be true or false, not {value!r}")
        return value


def refuse_others(config: Mapping[str, Any], neutral: Neutral) -> None:
    """Raises ValueError, with name and value, for an option that is not absent, null or neutral."""
    for key, (values, meaning) in neutral.items():
        if (value := config.get(key)) is not None and value not in values:
            only = f"only {values[0]!r} is implemented" if values else "this is not implemented"
            raise ValueError(f"{key!r} is {value!r}, which asks for {meaning}; {only}")


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model in one that reads images, too. Raises ValueError."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"'text_config' must be an object, not {text!r}")
    for key in ("rope_parameters", "rope_scaling"):
        of_text = [text.get("rope_parameters"), text.get("rope_scaling")]
        if config.get(key) and config[key] not in of_text:
            raise ValueError(
                f"{key!r} {config[key]!r} stands beside 'text_config', which says {of_text[0] or of_text[1]!r}; "
                "put what you mean into its 'rope_parameters' and remove the outer one"
            )
    found = {**text, **{key: config[key] for key in ("architectures", "quantization_config") if key in config}}
    if config.get("tie_word_embeddings") is not None:
        found["tie_word_embeddings"] = config["tie_word_embeddings"]
    for key in ("dtype", "torch_dtype", "eos_token_id", "bos_token_id"):
        if found.get(key) is None and config.get(key) is not None:
            found[key] = config[key]
    return found
