"""FP8 checkpoints: every scheme, family and split loads the float32 numbers that its codes mean, bit for bit.

The oracle is tests/models/quantised.py: it writes codes and scales, and the plain folder that they mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.checkpoint import WeightsError
from models.config import ModelConfig
from models.drafters.draft_config import DFlashConfig, Eagle3Config, MTPConfig
from models.drafters.load import load_dflash, load_eagle3, load_own_mtp
from models.drafters.mtp import MTPDraft
from models.kernels.traits import H200
from models.layers import moe
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.ops.rows_reference.dense import simulated
from models.quantization import read_quantization
from models.registry import config_from_dict, config_from_folder, model_class
from models.weights import load_model, without_memory
from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from parallel.layers.experts import ExpertSplit
from parallel.layers.weight import Weight, fp8
from runtime.build import build_engine
from runtime.config import ConfigError, EngineConfig, Fp8Activations
from runtime.model_checks import check_fp8
from tests.models import quantised4
from tests.models.drafters.tiny_drafters import dflash_config, dflash_tensors, eagle3_config, eagle3_tensors
from tests.models.quantised import quantise, schemes
from tests.models.tiny_checkpoint import TINY, RankOf, build, full_tensors, write
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_families import FAMILIES as OTHERS
from tests.models.tiny_nemotron import NEMOTRON
from tests.plant import reference_kernels
from tests.runtime.engine.rig import request, run

BLOCKS_OF_128 = read_quantization({"quantization_config": schemes(128)["A"].config})
KEPT = re.compile(r"embed|lm_head|\.gate\.weight|shared_expert_gate|in_proj_ba|in_proj_[ab]\.|conv1d|router")
EIGHT = {"num_attention_heads": 8, "intermediate_size": 80, "hidden_size": 40}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
PLAIN = {"attention_bias": False, "head_dim": 16}
MIXTRAL = PLAIN | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 3}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": TINY | EIGHT,
    "llama": TINY | EIGHT | PLAIN | {"architectures": ["LlamaForCausalLM"]},
    "qwen3-moe": TINY | EIGHT | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]},
    "mixtral": TINY | EIGHT | MIXTRAL,
    **{name: TINY | EIGHT | {"architectures": [f"{name.title()}ForCausalLM"]} | PLAIN for name in ("qwen2", "mistral")},
    **{name: TINY | changes | {"head_dim": 12} for name, changes in FAMILIES.items()},
    "nemotron-h": TINY | NEMOTRON | {"attention_bias": False},
    **{name: TINY | changes for name, changes in OTHERS.items()},
    "gemma3": TINY
    | {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 20, "attention_bias": False}
    | {"rope_parameters": None},
    "gpt-oss": TINY | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
}
SIZES = {"qwen3": (1, 2, 4, 8), "llama": (8,), "qwen3-moe": (1, 4, 8)}
CASES = [
    pytest.param(name, letter, marks=() if name == "qwen3" or letter == "ABC"[number % 3] else pytest.mark.long)
    for number, name in enumerate(MODELS)
    for letter in schemes()
]


def ignored(tensors: dict[str, Tensor]) -> list[str]:
    return [name.removesuffix(".weight") for name, tensor in tensors.items() if KEPT.search(name) and tensor.dim() == 2]


def write_both(folder: Path, config: dict[str, Any], letter: str, block: int = 16) -> tuple[Path, Path]:
    """(folder of codes in three files, folder of the numbers that they mean)."""
    tensors = full_tensors(config_from_dict(config))
    scheme = schemes(block)[letter]
    stored, meant, said = quantise(tensors, scheme, lambda name: bool(KEPT.search(name)), ignored(tensors))
    coded, plain = folder / "coded", folder / "plain"
    for made in (coded, plain):
        made.mkdir()
    write(coded, stored, files=3, config=config | {"quantization_config": said})
    write(plain, {name: tensor.clone() for name, tensor in meant.items()}, config=config)
    return coded, plain


def load(folder: Path, rank: int = 0, size: int = 1, *, whole: bool = False) -> Decoder:
    """Also of checkpoints of numbers with shared experts as those of codes have them."""
    before = moe._shared_beside

    def shared_beside(config: ModelConfig, *rest: Any) -> int:
        return before(replace(config, quantization=BLOCKS_OF_128), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "_shared_beside", shared_beside)
        return load_model(
            config_from_folder(folder),
            folder,
            collectives=SingleRank() if size == 1 else RankOf(rank, size),
            kernels=reference_kernels(),
            experts=ExpertSplit(whole=whole),
        )


def weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Weight):
                yield f"{path}.{name}", value


def check_same(coded: Decoder, plain: Decoder) -> None:
    found, expected = dict(weights(coded)), dict(weights(plain))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight.plain(torch.float32), expected[name].data), name
    assert any(part.scale is not None for weight in found.values() for part in weight.parts or (weight,))


@pytest.mark.parametrize(("model", "letter"), CASES)
def test_each_rank_holds_what_the_codes_mean(model: str, letter: str, tmp_path: Path) -> None:
    coded, plain = write_both(tmp_path, MODELS[model], letter)
    for size in SIZES.get(model, (1, 2)):
        check_same(load(coded, size - 1, size), load(plain, size - 1, size))
    if {"num_experts", "num_local_experts"} & MODELS[model].keys():
        check_same(load(coded, 1, 2, whole=True), load(plain, 1, 2, whole=True))


def test_blocks_that_a_shard_cuts_are_repeated_in_finer_ones(tmp_path: Path) -> None:
    """80 features over 8 ranks: 10 each, in blocks of 16: blocks of 2 have every edge."""
    coded, _ = write_both(tmp_path, MODELS["qwen3"], "A")
    found = dict(weights(load(coded, 3, 8)))
    assert found["layers.0.mlp.down.weight"].format.block == (16, 2)
    assert found["layers.0.mlp.gate_up.weight"].format.block == (2, 16)


def test_projections_of_a_delta_net_split_where_formats_differ(tmp_path: Path) -> None:
    coded, _ = write_both(tmp_path, MODELS["qwen3-next"], "A")
    projection = dict(weights(load(coded)))["layers.0.mixer.projection.weight"]
    codes, numbers = projection.parts
    assert codes.format.dtype == torch.float8_e4m3fn
    assert numbers.format.dtype == torch.float32
    assert numbers.outputs == 8  # b and a, one of each a value head


def test_parts_of_one_projection_may_differ_in_scheme(tmp_path: Path) -> None:
    """q and k as codes and v as it is, as an ignore list may ask."""
    config = MODELS["qwen3"]
    tensors = full_tensors(config_from_dict(config))
    kept = [*ignored(tensors), *(name.removesuffix(".weight") for name in tensors if "v_proj.weight" in name)]
    stored, meant, said = quantise(tensors, schemes()["A"], lambda name: name.removesuffix(".weight") in kept, kept)
    for name, made, extra in (("coded", stored, {"quantization_config": said}), ("plain", meant, {})):
        (tmp_path / name).mkdir()
        write(tmp_path / name, {key: one.clone() for key, one in made.items()}, config=config | extra)
    coded, plain = load(tmp_path / "coded", 1, 2), load(tmp_path / "plain", 1, 2)
    check_same(coded, plain)
    qkv, expected = (dict(weights(model))["layers.0.mixer.qkv.weight"] for model in (coded, plain))
    assert [part.outputs for part in qkv.parts] == [qkv.outputs - 10, 10]
    x_TN = torch.randn(3, qkv.inner)
    torch.testing.assert_close(reference_kernels().linear(x_TN, qkv), reference_kernels().linear(x_TN, expected))


def test_fused_names_in_an_ignore_list_leave_numbers_as_they_are(tmp_path: Path) -> None:
    """The names of other loaders' merged matrices (vllm#43981, sglang#26213): the files decide."""
    config = MODELS["qwen3"]
    tensors = full_tensors(config_from_dict(config))
    numbers = re.compile(KEPT.pattern + "|[qkv]_proj|gate_proj|up_proj")
    names = ["lm_head", "self_attn.qkv_proj", "mlp.gate_up_proj"]
    stored, meant, said = quantise(tensors, schemes()["A"], lambda name: bool(numbers.search(name)), names)
    for name, made, extra in (("coded", stored, {"quantization_config": said}), ("plain", meant, {})):
        (tmp_path / name).mkdir()
        write(tmp_path / name, {key: one.clone() for key, one in made.items()}, config=config | extra)
    check_same(load(tmp_path / "coded"), load(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("shape", "size", "block"),
    [
        ("qwen3-30b-a3b", 4, (64, 64)),
        ("qwen3-30b-a3b", 8, (32, 32)),
        ("qwen3.5-35b-a3b", 8, (64, 64)),
        ("qwen3-next-80b-a3b", 8, (64, 64)),
    ],
)
def test_experts_of_real_sizes_are_cut_without_rounding(shape: str, size: int, block: tuple[int, int]) -> None:
    """Which peers refuse (vllm#25292, sglang#10852): blocks of 128 that the edges of a rank's experts cross."""
    folder = Path(__file__).parents[2] / "models" / "shapes" / shape
    config = config_from_folder(folder)
    experts = config.experts
    assert experts is not None
    config = replace(config, layers=1, experts=replace(experts, layers=(0,)), quantization=BLOCKS_OF_128)
    context = ModelContext(RankOf(size - 1, size), reference_kernels(), torch.bfloat16)
    build_one = model_class(config.architecture)
    model = without_memory(lambda plan: build_one(config, replace(context, plan=plan)), config.quantization)
    found = {name: weight.format.block for name, weight in weights(model) if "experts" in name}
    up, down = (next(block for name, block in found.items() if part in name) for part in ("gate_up", "down"))
    assert (up, down) == ((block[0], 128), (128, block[1]))


@pytest.mark.parametrize("size", [1, 2])
def test_fused_experts_have_fused_scales(size: int, tmp_path: Path) -> None:
    """[E, 2 I, N] and [E, N, I], as transformers 5 saves them, with scales of the same order."""
    coded, plain = write_both(tmp_path, MODELS["qwen3-moe"], "A")
    tensors: dict[str, Tensor] = {}
    for file in sorted(coded.glob("*.safetensors")):
        tensors |= load_file(file)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        for suffix, ending in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            parts = {
                kind: [tensors.pop(f"{prefix}{expert}.{kind}_proj.{suffix}") for expert in range(8)]
                for kind in ("gate", "up", "down")
            }
            both = [torch.cat([g.float(), u.float()]) for g, u in zip(parts["gate"], parts["up"], strict=True)]
            kind = parts["gate"][0].dtype
            tensors[f"{prefix}gate_up_proj{ending}"] = torch.stack(both).to(kind)
            tensors[f"{prefix}down_proj{ending}"] = torch.stack([one.float() for one in parts["down"]]).to(kind)
    (fused := tmp_path / "fused").mkdir()
    write(fused, tensors, config=json.loads((coded / "config.json").read_text()))
    check_same(load(fused, size - 1, size), load(plain, size - 1, size))


def test_dummy_weights_take_a_quantization_config() -> None:
    said = {**schemes()["A"].config, "modules_to_not_convert": ["linear_attn.in_proj_ba"]}
    config = config_from_dict(MODELS["qwen3-next"] | {"quantization_config": said})
    halves = [
        load_model(
            config,
            None,
            load_format="dummy",
            collectives=SingleRank() if size == 1 else RankOf(1, size),
            kernels=reference_kernels(),
        )
        for size in (1, 2)
    ]
    whole, half = (dict(weights(model))["layers.0.mixer.out_projection.weight"] for model in halves)
    assert torch.equal(whole.plain(torch.float32)[:, whole.inner // 2 :], half.plain(torch.float32))
    spread = float(whole.plain(torch.float32).std()) * whole.inner**0.5
    assert 0.8 < spread < 1.2
    plain = load_model(
        replace(config, quantization=None),
        None,
        load_format="dummy",
        collectives=SingleRank(),
        kernels=reference_kernels(),
    )
    assert torch.equal(dict(weights(halves[0]))["lm_head.weight"].data, dict(weights(plain))["lm_head.weight"].data)


# -- what is refused ----------------------------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj."


def change(folder: Path, changes: dict[str, Tensor | None], said: dict[str, Any] | None = None) -> None:
    """Rewrites the folder as one file; None removes a tensor; ``said`` goes into quantization_config."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file(
        {name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    if said:
        config["quantization_config"] = config.get("quantization_config", {}) | said
    (folder / "config.json").write_text(json.dumps(config))


CODES = torch.ones(80, 40).to(torch.float8_e4m3fn)
GRID = torch.ones(5, 3)


def one_code(code: int) -> Tensor:
    """``code`` among others."""
    codes = CODES.clone()
    codes.view(torch.uint8)[41, 7] = code
    return codes


@pytest.mark.parametrize(
    ("changes", "said", "words"),
    [
        ({f"{UP}weight_scale_inv": None}, {}, f"'{UP}weight' is F8_E4M3, but no file holds its scale"),
        (
            {f"{UP}weight": torch.ones(80, 40)},
            {},
            f"'{UP}weight_scale_inv' is the scale of a matrix that is not F8_E4M3",
        ),
        ({f"{UP}weight_scale_inv": torch.zeros(5, 3)}, {}, "holds a number that is not finite and positive"),
        ({f"{UP}weight_scale_inv": GRID / 0}, {}, "holds a number that is not finite and positive"),
        ({f"{UP}weight_scale_inv": torch.ones(5, 2)}, {}, "has shape [5, 2], but a matrix [80, 40] with 'weight_block"),
        ({f"{UP}weight_scale_inv": GRID.to(torch.int32)}, {}, "has dtype I32; scales must be one of F32"),
        (
            {f"{UP}weight": torch.ones(80, 40).to(torch.float8_e5m2)},
            {},
            f"'{UP}weight' has dtype F8_E5M2; supported are",
        ),
        *(({f"{UP}weight": one_code(code)}, {}, "holds codes that are no numbers") for code in (127, 255)),
        (
            {},
            {"modules_to_not_convert": ["mlp.up_proj"]},
            "'modules_to_not_convert' entry 'mlp.up_proj' leaves it as it",
        ),
        (
            {"lm_head.weight": torch.ones(37, 40).to(CODES.dtype), "lm_head.weight_scale_inv": torch.ones(3, 3)},
            {"modules_to_not_convert": []},
            "'lm_head.weight' is F8_E4M3, but routers, embeddings and heads are not quantised",
        ),
        ({f"{UP}weight_scale": GRID}, {}, f"'{UP}weight_scale' is the scale of a matrix that is not F8_E4M3"),
    ],
)
def test_contradictions_name_file_tensor_and_entry(
    changes: dict[str, Tensor | None], said: dict[str, Any], words: str, tmp_path: Path
) -> None:
    coded, _ = write_both(tmp_path, MODELS["qwen3"], "A")
    change(coded, changes, said)
    with pytest.raises(WeightsError, match=re.escape(words)) as caught:
        load(coded)
    assert "model.safetensors" in str(caught.value) or "lm_head" in words


def test_codes_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    coded, _ = write_both(tmp_path, MODELS["qwen3"], "A")
    config = json.loads((coded / "config.json").read_text())
    del config["quantization_config"]
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"that the model does not have: .*weight_scale_inv"):
        load(coded)


def test_scales_of_activations_keys_and_values_are_checked_and_unused(tmp_path: Path) -> None:
    coded, plain = write_both(tmp_path, MODELS["qwen3"], "D")
    attention = "model.layers.0.self_attn."
    change(coded, {f"{attention}k_scale": torch.tensor([0.5]), f"{attention}k_proj.k_scale": torch.tensor(0.5)})
    check_same(load(coded), load(plain))
    (tmp_path / "bad").mkdir()
    coded, _ = write_both(tmp_path / "bad", MODELS["qwen3"], "D")
    change(coded, {f"{UP}input_scale": torch.tensor([float("nan")])})
    with pytest.raises(WeightsError, match="input_scale' holds a number that is not finite"):
        load(coded)


# -- whole engines ------------------------------------------------------------------------------------------------


def test_an_mtp_layer_in_its_targets_checkpoint_may_be_codes(tmp_path: Path) -> None:
    """Its entry projection stays as it is (ROCm/ATOM#755: files decide, not assumptions)."""
    config = MODELS["qwen3-next"] | {"mtp_num_hidden_layers": 1}
    tensors = full_tensors(config_from_dict(config))
    target = build(config_from_dict(config))
    with torch.device("meta"):
        draft = MTPDraft(
            MTPConfig.of_target(target.config), ModelContext(SingleRank(), reference_kernels(), torch.float32)
        )
    for name, shard in draft.checkpoint_shards().items():
        tensors[name] = torch.randn(shard.full_shape) * 0.1
    names = [*ignored(tensors), "mtp.fc"]
    kept = {f"{name}.weight" for name in names}
    stored, meant, said = quantise(tensors, schemes()["A"], lambda name: name in kept, names)
    found = []
    for folder, made, more in (("coded", stored, {"quantization_config": said}), ("plain", meant, {})):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, {name: one.clone() for name, one in made.items()}, files=2, config=config | more)
        found.append(dict(weights(load_own_mtp(load(tmp_path / folder), tmp_path / folder))))
    coded, plain = found
    assert any(weight.scale is not None for weight in coded.values())
    for name, weight in coded.items():
        assert torch.equal(weight.plain(torch.float32), plain[name].data), name


@pytest.mark.parametrize("name", ["A", "B", "int4-zeros"])
def test_drafters_of_their_own_folder_may_be_codes(name: str, tmp_path: Path) -> None:
    """DFlash stacks the entry rows of its layers, EAGLE-3 has a head and an embedding that stay as they are."""
    of_target = TINY | {"attention_bias": False, "architectures": ["Qwen3ForCausalLM"]}
    target = load_model(
        config_from_dict(of_target),
        None,
        load_format="dummy",
        collectives=SingleRank(),
        kernels=reference_kernels(),
    )
    kinds: tuple[tuple[str, dict[str, Any], dict[str, Tensor]], ...] = (
        ("dflash", dflash_config(), dflash_tensors(dflash_config())),
        ("eagle3", eagle3_config(), eagle3_tensors(eagle3_config(), range(6))),
    )
    for kind, config, tensors in kinds:
        kept = [name.removesuffix(".weight") for name in tensors if re.search(r"embed|lm_head|^fc|norm", name)]
        is_kept = lambda one: one.removesuffix(".weight") in kept  # noqa: B023, E731
        if name in schemes():
            stored, meant, said = quantise(tensors, schemes()[name], is_kept, kept)
        else:
            stored, meant, said = quantised4.quantise(tensors, quantised4.schemes()[name], is_kept, kept)
        found = []
        for label, held, more in (("coded", stored, {"quantization_config": said}), ("plain", meant, {})):
            (folder := tmp_path / f"{kind}-{label}").mkdir()
            write(folder, {key: one.clone() for key, one in held.items()}, config=config | more)
            draft: nn.Module
            if kind == "dflash":
                draft = load_dflash(target, DFlashConfig.from_folder(folder), folder)
            else:
                draft = load_eagle3(target, Eagle3Config.from_folder(folder), folder)
            found.append(dict(weights(draft)))
        coded, plain = found
        assert any(part.scale is not None for weight in coded.values() for part in weight.parts or (weight,)), kind
        for part_name, weight in coded.items():
            assert torch.equal(weight.plain(torch.float32), plain[part_name].plain(torch.float32)), (kind, part_name)


def answers(folder: Path, activations: Fp8Activations, depth: int = 2, **options: Any) -> dict[int, tuple[int, ...]]:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        max_num_seqs=8,
        max_model_len=64,
        num_blocks=64,
        chain_depth=depth,
        fp8_activations=activations,
        bundles=str(folder / "bundles"),
        **options,
    )
    asked = [request(i, range(3 + i, 9 + 2 * i), max_tokens=12) for i in range(6)]
    with build_engine(
        config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
    ) as engine:
        return {i: one.token_ids for i, one in run(engine, asked).items()}


@pytest.mark.slow
def test_an_engine_answers_as_the_numbers_that_codes_mean(tmp_path: Path) -> None:
    coded, plain = write_both(tmp_path, MODELS["qwen3-moe"], "A")
    expected = answers(plain, "auto")
    assert answers(coded, "auto") == answers(coded, "never") == answers(coded, "auto", depth=0) == expected
    assert answers(coded, "always") == answers(coded, "always", depth=0)


def test_quantised_activations_are_rounded_by_rows_and_groups() -> None:
    weight = Weight(CODES, fp8(16, 8), None, torch.full((5, 5), 0.01))
    kernels, x_TN = reference_kernels(), torch.randn(3, 40) * torch.tensor([[1.0], [100.0], [1e-3]])
    exact = kernels.linear(x_TN, weight)
    kernels.fp8_activations = "always"
    rounded = kernels.linear(x_TN, weight)
    errors = (rounded - exact).abs() / (x_TN.abs().sum(1, keepdim=True) * 0.01)
    assert 0 < float(errors.max()) < 2**-4  # e4m3 keeps three bits behind the first


def test_activations_are_cut_where_fbgemm_cuts_them(tmp_path: Path) -> None:
    coded, _ = write_both(tmp_path, MODELS["qwen3"], "J")
    change(coded, {}, {"activation_scale_ub": 3.0})
    weight = dict(weights(load(coded)))["layers.0.mlp.down.weight"]
    assert weight.format.activation_cap == 3.0
    kernels, x_TN = reference_kernels(), torch.randn(4, weight.inner) * 4
    kernels.fp8_activations = "always"
    expected = simulated(x_TN.clamp(-3, 3), weight.inner) @ weight.plain(torch.float32).T
    assert torch.equal(kernels.linear(x_TN, weight), expected)
    x_TN[0, 0] = float("nan")
    assert kernels.linear(x_TN, weight)[0].isnan().all()
    assert dict(weights(load(coded, 1, 2)))["layers.0.mlp.down.weight"].format.activation_cap == 3.0


def test_gpus_without_fp8_tensor_cores_multiply_no_codes() -> None:
    ampere, always = replace(H200, capability=(8, 0)), EngineConfig(model="m", fp8_activations="always")
    check_fp8(EngineConfig(model="m"), ampere)
    check_fp8(always, H200)
    with pytest.raises(ConfigError, match=r"--fp8-activations always needs compute capability 8\.9 .* not 8\.0"):
        check_fp8(always, ampere)
