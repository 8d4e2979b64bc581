"""SpeculativeConfig: what --speculative-config says, under vLLM's names, checked before anything is loaded.

Knows: the keys there are, which belong to which method, legal values, and what to type instead of an illegal one.
Does not know: models (runtime/build.py compares a drafter with its target), how a method works (runtime/speculate).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Final

FLAG: Final = "--speculative-config"
MOST_SPECULATIVE_TOKENS: Final = 255  # a step has 256 tokens a row at most (LIMIT_RANGES in schedule/config.py)

METHODS: Final = ("ngram", "mtp", "dflash", "eagle3", "synthetic")
"""Those that this build has. What others there are in vLLM, and are refused by name:"""
MISSING_METHODS: Final = ("eagle", "medusa", "mlp_speculator", "draft_model", "suffix", "ngram_gpu", "dspark")
WITH_WEIGHTS: Final = ("mtp", "dflash", "eagle3")  # methods that read a folder of weights: ``model``
WITH_OWN_LAYER: Final = ("mtp",)  # of these: whose weights may lie in the target's own folder
DEFAULT_LOOKUP: Final = 5  # tokens of an n-gram, where neither end of the range is given, as in vLLM
ACCEPTANCE_METHODS: Final = ("standard", "synthetic")
DRAFT_SAMPLE_METHODS: Final = ("greedy", "probabilistic")
BRANCHING: Final = ("mtp", "dflash", "eagle3", "synthetic")  # methods whose drafts can be trees: ``tree_size``
MOST_TREE_TOKENS: Final = 33  # the root and a node for each bit of a mask
DEFAULT_TREE_TOP_K: Final = 8
DEFAULT_MIXED_STEP_PERCENT: Final = 25
LEAST_AUTOMATIC_WIDTH: Final = 4  # narrower windows were never measured, so no start captures them unasked


class SpeculativeConfigError(ValueError):
    """A key or value that cannot work. The text names it, the value and what to type instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The keys of --speculative-config. After construction none is left open that the method needs.

    method: the drafter: ``ngram`` looks for the latest tokens earlier in the sequence; ``mtp`` is a layer beyond the
    model that drafts one token after the other, ``eagle3`` one that reads several layers of the model, ``dflash`` a
    small model that drafts a block at once; ``synthetic`` proposes any tokens, of which a scripted number is kept: for
    measurements only.
    model: folder of the drafter's weights, for methods that have some; without it ``mtp`` is a layer of the target's
    own checkpoint.
    token_map: of methods with weights: the ids that the drafter drafts from, for a cheaper head: a file of them
    (SGLang's --speculative-token-map), or a number for the first so many. None: all, or those of the drafter's folder.
    num_speculative_tokens: k, proposals a round; a row may gain k + 1 tokens in a step.
    prompt_lookup_max, prompt_lookup_min: of ngram: the longest and shortest run of tokens that is looked for. One alone
    stands for both; without either both are 5.
    draft_sample_method: ``greedy`` proposes what a drafter finds most probable; ``probabilistic`` draws proposals of
    requests that draw at random, and keeps them by rejection sampling with the probabilities of both: the distribution
    is that without speculation, the tokens are not.
    rejection_sample_method: ``standard`` keeps what the target draws itself; ``synthetic`` keeps as many proposals as
    the rates say, whatever the target draws: the text means nothing, so only benchmarks take it.
    synthetic_acceptance_rates: of synthetic acceptance: the share of rounds in which the first, the first two, ... of
    the k proposals are kept; in [0, 1], not ascending. synthetic_acceptance_length: instead: the mean number of tokens
    a round, 1 to k + 1, from which rates are made with the least spread.
    tree_size: tokens of a draft tree, root included, of which a round keeps a path of num_speculative_tokens at most;
    None: a chain. At least one more than num_speculative_tokens: the best path is in the tree whole.
    tree_top_k: the best tokens at each place that a path may take.
    disable_by_batch_size: the most decode rows for a step to be a window; 0 never makes one. None:
    windows are made where landed rounds say that they pay (schedule/speculation.py).
    fewer_speculative_tokens: smaller k, descending, which a step may have where measured costs and landed rounds say
    that it gives more tokens/s; each is captured, too. Chains only, and not with disable_by_batch_size, which is a
    separate rule. None: where windows are chains of 8 tokens or more, without that rule, the k of W // 2 and W // 4
    tokens (``fewer``); a start without a GPU, and data-parallel groups, have none then.
    mixed_step_percent: of the tokens that a step with prompt chunks may have, so many may be windows' of the rows that
    decode with them; with 0 these rows have one token each.

    Raises SpeculativeConfigError at construction.
    """

    method: str
    model: str | None = None
    token_map: str | int | None = None
    num_speculative_tokens: int = None  # type: ignore[assignment]  # required; its absence is explained below
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    tree_size: int | None = None
    tree_top_k: int | None = None
    disable_by_batch_size: int | None = None
    fewer_speculative_tokens: tuple[int, ...] | None = None
    mixed_step_percent: int = DEFAULT_MIXED_STEP_PERCENT

    def __post_init__(self) -> None:
        self._check_method()
        k = self.num_speculative_tokens
        if k is None:
            raise SpeculativeConfigError(
                f'{FLAG} names no num_speculative_tokens: type "num_speculative_tokens": 4 in it, or '
                "--num-speculative-tokens 4"
            )
        self._check_model()
        self._check_token_map()
        _check_whole("num_speculative_tokens", k, 1, MOST_SPECULATIVE_TOKENS)
        if self.disable_by_batch_size is not None:
            _check_whole("disable_by_batch_size", self.disable_by_batch_size, 0, None)
        _check_whole("mixed_step_percent", self.mixed_step_percent, 0, 100)
        self._fill_fewer()
        self._fill_lookup()
        self._fill_tree()
        self._fill_acceptance()
        self._check_draft_sampling()

    def _check_method(self) -> None:
        if self.method in MISSING_METHODS:
            raise SpeculativeConfigError(
                f"{FLAG}: method {self.method!r} is not built in: there are {', '.join(METHODS)}"
            )
        if self.method not in METHODS:
            raise SpeculativeConfigError(f"{FLAG}: method is {self.method!r}, but must be one of {', '.join(METHODS)}")
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise SpeculativeConfigError(
                f"{FLAG}: model is {self.model!r}, but must be a text, the folder of your drafter: type "
                '"model": "path/to/drafter"'
            )
        if self.model is not None and self.method not in WITH_WEIGHTS:
            raise SpeculativeConfigError(
                f"{FLAG}: model is {self.model!r}, but method {self.method!r} has no weights: leave model out"
            )

    def _check_model(self) -> None:
        if self.method in WITH_WEIGHTS and self.method not in WITH_OWN_LAYER and self.model is None:
            demo = f'"models/demo/{self.method}" for the demo model, or ' if self.method == "dflash" else ""
            raise SpeculativeConfigError(
                f"{FLAG}: method {self.method!r} reads weights, but names no folder of them: type "
                f'"model": {demo}the folder of your drafter'
            )

    def _check_token_map(self) -> None:
        if (given := self.token_map) is None:
            return
        if self.method not in WITH_WEIGHTS:
            raise SpeculativeConfigError(
                f"{FLAG}: token_map is {given!r}, but method {self.method!r} has no head to make smaller: leave it out"
            )
        if isinstance(given, bool) or not isinstance(given, int | str) or given == "":
            raise SpeculativeConfigError(
                f"{FLAG}: token_map is {given!r}, but must be a file of token ids, or how many of the first ids there "
                'are to be: type "token_map": 32768'
            )
        if isinstance(given, int):
            _check_whole("token_map", given, 1, None)

    def _fill_fewer(self) -> None:
        fewer, k = self.fewer_speculative_tokens, self.num_speculative_tokens
        if fewer is None:
            return
        listed = list(fewer) if isinstance(fewer, list | tuple) else None
        whole = [one for one in listed or () if isinstance(one, int) and not isinstance(one, bool) and 0 < one < k]
        if listed is None or whole != listed or whole != sorted(set(whole), reverse=True):
            some = sorted(set(whole), reverse=True) or ([k // 2] if k > 1 else [])
            typed = f'type "fewer_speculative_tokens": {some}' if some else "leave it out"
            raise SpeculativeConfigError(
                f"{FLAG}: fewer_speculative_tokens is {fewer if listed is None else listed!r}, but must be a list of "
                f"whole numbers from 1 on, descending from below num_speculative_tokens ({k}): {typed}"
            )
        if fewer and self.tree_size is not None:
            raise SpeculativeConfigError(
                f"{FLAG}: fewer_speculative_tokens is {listed}, but tree_size is {self.tree_size}, and trees have "
                "one size: leave one of them out"
            )
        if fewer and self.disable_by_batch_size is not None:
            raise SpeculativeConfigError(
                f"{FLAG}: fewer_speculative_tokens is {listed}, chosen from by gains, but disable_by_batch_size "
                f"is {self.disable_by_batch_size}, which goes by rows alone: leave one of them out"
            )
        object.__setattr__(self, "fewer_speculative_tokens", tuple(listed))

    def _fill_lookup(self) -> None:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if self.method != "ngram":
            for name in ("prompt_lookup_min", "prompt_lookup_max"):
                if getattr(self, name) is not None:
                    raise SpeculativeConfigError(
                        f"{FLAG}: {name} is {getattr(self, name)!r}, but method {self.method!r} looks nothing up: "
                        f'leave it out, or type "method": "ngram"'
                    )
            return
        for name, value in (("prompt_lookup_min", low), ("prompt_lookup_max", high)):
            if value is not None:
                _check_whole(name, value, 1, 32)
        high = high or low or DEFAULT_LOOKUP
        low = low or high
        if low > high:
            raise SpeculativeConfigError(
                f'{FLAG}: prompt_lookup_min is {low}, but prompt_lookup_max is {high}: type "prompt_lookup_max": {low}'
            )
        object.__setattr__(self, "prompt_lookup_min", low)
        object.__setattr__(self, "prompt_lookup_max", high)

    def _fill_tree(self) -> None:
        size, top_k, k = self.tree_size, self.tree_top_k, self.num_speculative_tokens
        if size is None:
            if top_k is not None:
                raise SpeculativeConfigError(
                    f'{FLAG}: tree_top_k is {top_k!r}, but there is no tree: leave it out, or type "tree_size": '
                    f"{min(MOST_TREE_TOKENS, 2 * k + 2)}"
                )
            return
        if self.method not in BRANCHING:
            raise SpeculativeConfigError(
                f"{FLAG}: tree_size is {size!r}, but method {self.method!r} has one token a place: leave it out, or "
                f'type "method": one of {", ".join(BRANCHING)}'
            )
        _check_whole("tree_size", size, 2, MOST_TREE_TOKENS)
        if size <= k:
            shorter = f'"num_speculative_tokens": {size - 1} or less'
            larger = f'"tree_size": {k + 1} or more, or ' if k < MOST_TREE_TOKENS else ""
            raise SpeculativeConfigError(
                f"{FLAG}: tree_size is {size}, but num_speculative_tokens is {k}: a tree holds its likeliest path, and "
                f"the token that it begins with: type {larger}{shorter}"
            )
        top_k = DEFAULT_TREE_TOP_K if top_k is None else top_k
        _check_whole("tree_top_k", top_k, 1, MOST_TREE_TOKENS)
        most = sum(top_k**place for place in range(min(k, 6) + 1)) if top_k > 1 else k + 1
        if most < size:
            raise SpeculativeConfigError(
                f"{FLAG}: tree_size is {size}, but tree_top_k is {top_k} and num_speculative_tokens is {k}: so many "
                f'tokens a place make trees of {most} at most: type "tree_size": {most} or less, or a larger '
                '"tree_top_k"'
            )
        object.__setattr__(self, "tree_top_k", top_k)

    def _fill_acceptance(self) -> None:
        if self.rejection_sample_method not in ACCEPTANCE_METHODS:
            raise SpeculativeConfigError(
                f"{FLAG}: rejection_sample_method is {self.rejection_sample_method!r}, but must be one of "
                f"{', '.join(ACCEPTANCE_METHODS)}"
            )
        if self.method == "synthetic":
            object.__setattr__(self, "rejection_sample_method", "synthetic")
        rates, length, k = (
            self.synthetic_acceptance_rates,
            self.synthetic_acceptance_length,
            self.num_speculative_tokens,
        )
        if not self.synthetic:
            for name in ("synthetic_acceptance_rates", "synthetic_acceptance_length"):
                if getattr(self, name) is not None:
                    raise SpeculativeConfigError(
                        f"{FLAG}: {name} is given, but proposals are kept where the target draws them: leave it out, "
                        'or type "rejection_sample_method": "synthetic" for a benchmark'
                    )
            return
        if (rates is None) == (length is None):
            both = "both are" if rates is not None else "neither is"
            raise SpeculativeConfigError(
                f"{FLAG}: synthetic acceptance needs one of synthetic_acceptance_rates and "
                f'synthetic_acceptance_length, and {both} given: type "synthetic_acceptance_length": {1 + k / 2:g}'
            )
        if length is not None:
            if not _is_number(length) or not 1 <= length <= k + 1:
                raise SpeculativeConfigError(
                    f"{FLAG}: synthetic_acceptance_length is {length!r}, but num_speculative_tokens is {k}: type a "
                    f"number from 1 to {k + 1}"
                )
            rates = rates_of_length(length, k)
        assert rates is not None
        if not isinstance(rates, list | tuple) or len(rates) != k:
            raise SpeculativeConfigError(
                f"{FLAG}: synthetic_acceptance_rates is {rates!r}, but num_speculative_tokens is {k}: type a list "
                f"of {k}"
            )
        if not all(_is_number(rate) and 0 <= rate <= 1 for rate in rates) or any(a < b for a, b in pairwise(rates)):
            raise SpeculativeConfigError(
                f"{FLAG}: synthetic_acceptance_rates is {list(rates)}, but a rate is a number from 0 to 1, none larger "
                "than the one before it"
            )
        object.__setattr__(self, "synthetic_acceptance_rates", tuple(float(rate) for rate in rates))
        object.__setattr__(self, "synthetic_acceptance_length", None)

    def _check_draft_sampling(self) -> None:
        if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
            raise SpeculativeConfigError(
                f"{FLAG}: draft_sample_method is {self.draft_sample_method!r}, but must be one of "
                f"{', '.join(DRAFT_SAMPLE_METHODS)}"
            )
        if self.probabilistic and self.method not in WITH_WEIGHTS:
            raise SpeculativeConfigError(
                f"{FLAG}: draft_sample_method is 'probabilistic', but method {self.method!r} has no probabilities to "
                "draw from: leave it out"
            )
        if self.probabilistic and self.tree_size is not None:
            raise SpeculativeConfigError(
                f"{FLAG}: draft_sample_method is 'probabilistic', but tree_size is {self.tree_size}: rejection "
                "sampling takes a chain of drawn proposals, and a tree has the likeliest of each place: leave one of "
                "them out"
            )
        if self.probabilistic and self.synthetic:
            raise SpeculativeConfigError(
                f"{FLAG}: draft_sample_method is 'probabilistic', but rejection_sample_method 'synthetic', which keeps "
                "proposals whatever their probabilities are: leave one of them out"
            )

    @property
    def probabilistic(self) -> bool:
        """Whether proposals are drawn, and kept by rejection sampling."""
        return self.draft_sample_method == "probabilistic"

    @property
    def synthetic(self) -> bool:
        """Whether a script says how many proposals are kept, so that texts mean nothing."""
        return self.rejection_sample_method == "synthetic"

    @property
    def width(self) -> int:
        """W, tokens that a row may gain in a round."""
        return self.num_speculative_tokens + 1

    @property
    def fewer(self) -> tuple[int, ...]:
        """Smaller k, descending: those asked for, else of W // 2 and W // 4 tokens, 4 at least, where a step may have
        several."""
        if self.fewer_speculative_tokens is not None:
            return self.fewer_speculative_tokens
        if self.tree_size is not None or self.disable_by_batch_size is not None:
            return ()
        return tuple(w - 1 for w in (self.width // 2, self.width // 4) if w >= LEAST_AUTOMATIC_WIDTH)

    @property
    def label(self) -> str:
        """For results and titles: the method, with ``synthetic`` where that is what was accepted, and a tree's size."""
        name = self.method if self.tree_size is None else f"{self.method} tree of {self.tree_size}"
        return name if not self.synthetic or self.method == "synthetic" else f"{name} (synthetic)"

    def __str__(self) -> str:
        """As one could type it."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps({name: value for name, value in given.items() if value is not None})


def speculative_config(given: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
    """From the JSON text of a command line, or a mapping of the same keys. Raises SpeculativeConfigError."""
    if isinstance(given, SpeculativeConfig):
        return given
    given = _mapping(given)
    if "speculative_token_tree" in given:
        raise SpeculativeConfigError(
            f"{FLAG} has 'speculative_token_tree', a tree whose shape is fixed, but here a tree grows anew in every "
            f'round: type its tokens, "tree_size": 2 to {MOST_TREE_TOKENS}'
        )
    known = [f.name for f in fields(SpeculativeConfig)]
    if unknown := sorted(str(key) for key in given if key not in known):
        raise SpeculativeConfigError(f"{FLAG} has {unknown[0]!r}, which is not known: there are {', '.join(known)}")
    if (method := given.get("method")) is None:
        if given.get("model") is not None:
            raise SpeculativeConfigError(
                f'{FLAG} names a model, but no method: type "method": one of {", ".join(WITH_WEIGHTS)}'
            )
        raise SpeculativeConfigError(
            f'{FLAG} names no method: type "method": "{METHODS[0]}" in it, or --speculative-method {METHODS[0]}'
        )
    if not isinstance(method, str):
        raise SpeculativeConfigError(f"{FLAG}: method is {method!r}, but must be one of {', '.join(METHODS)}")
    return SpeculativeConfig(**given)


def _mapping(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given, object_pairs_hook=_each_once)
        except SpeculativeConfigError:
            raise
        except ValueError as error:
            raise SpeculativeConfigError(
                f"{FLAG} is {given!r}, which is not JSON ({error}): type "
                '\'{"method": "ngram", "num_speculative_tokens": 4}\''
            ) from None
    if not isinstance(given, Mapping):
        raise SpeculativeConfigError(f"{FLAG} is {given!r}, but must be a JSON object of keys and values")
    return given


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that is there twice json.loads would take the last value, and say nothing."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise SpeculativeConfigError(
                f"{FLAG} has {key!r} twice, {found[key]!r} and {value!r}: leave one of them out"
            )
        found[key] = value
    return found


def merged_speculation(
    given: str | Mapping[str, Any] | SpeculativeConfig | None, plain: Mapping[str, Any]
) -> SpeculativeConfig | None:
    """``given`` and the keys that stand alone (``plain``, None where one does not); None where there is neither.

    Raises SpeculativeConfigError, also for a key that both say differently.
    """
    plain = {key: value for key, value in plain.items() if value is not None}
    if given is None:
        return speculative_config(plain) if plain else None
    if not plain:
        return speculative_config(given)
    mapping = given if isinstance(given, SpeculativeConfig) else _mapping(given)
    for key, value in plain.items():
        there = getattr(mapping, key) if isinstance(mapping, SpeculativeConfig) else mapping.get(key, value)
        if there != value:
            flag = "--num-speculative-tokens" if key == "num_speculative_tokens" else f"--speculative-{key}"
            raise SpeculativeConfigError(f"{FLAG} says {key} {there!r}, but {flag} {value!r}: leave one of them out")
    return mapping if isinstance(mapping, SpeculativeConfig) else speculative_config({**mapping, **plain})


def refuse_synthetic(config: SpeculativeConfig | None, who: str) -> None:
    """Raises SpeculativeConfigError where ``who`` would hand out texts of an engine whose acceptance is scripted."""
    if config is not None and config.synthetic:
        real = f'{{"method": "{METHODS[0]}", "num_speculative_tokens": {config.num_speculative_tokens}}}'
        instead = f"type '{real}'"
        if config.method != "synthetic":
            instead = "leave rejection_sample_method and the synthetic_ key out"
        raise SpeculativeConfigError(
            f"{FLAG} is {config}: with synthetic acceptance texts mean nothing, so {who} refuses it: {instead}, or "
            "measure with bench"
        )


def rates_of_length(length: float, k: int) -> tuple[float, ...]:
    """Rates of k proposals whose rounds gain ``length`` tokens on average (1 to k + 1), spread as little as can be:
    every round keeps the whole part of what is wanted, or one more."""
    return tuple(min(1.0, max(0.0, length - 1 - place)) for place in range(k))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_whole(name: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        is_meant = isinstance(value, float) and value.is_integer()
        is_meant |= isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10
        meant = int(value) if is_meant else low  # type: ignore[call-overload]
        raise SpeculativeConfigError(f'{FLAG}: {name} is {value!r}, but must be a whole number: type "{name}": {meant}')
    if value < low:
        raise SpeculativeConfigError(f'{FLAG}: {name} is {value}, but must be at least {low}: type "{name}": {low}')
    if high is not None and value > high:
        raise SpeculativeConfigError(f'{FLAG}: {name} is {value}, but must be at most {high}: type "{name}": {high}')
