"""Four-bit checkpoints: every format, family and split holds the float32 numbers that its codes mean.

The oracle is tests/models/quantised4.py: it writes codes by formula, and the plain folder that they mean.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoint import WeightsError
from models.drafters.draft_config import MTPConfig
from models.drafters.load import load_own_mtp
from models.drafters.mtp import MTPDraft
from models.kernels.traits import FLOAT8_CAPABILITY
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.quantization import ALGORITHMS, FOUR_BITS, READERS, STRATEGIES
from models.registry import ARCHITECTURES, config_from_dict, model_class
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from parallel.layers.weight import Weight, mxfp4
from tests.models.parity_worker import run_models
from tests.models.quantised import schemes as fp8_schemes
from tests.models.quantised4 import Scheme, gpt_oss_experts, ordered, quantise, schemes
from tests.models.test_fp8 import CASES as FP8_CASES
from tests.models.test_fp8 import KEPT, answers, change, ignored, load, weights
from tests.models.test_fp8 import MODELS as FP8_MODELS
from tests.models.tiny_checkpoint import TINY, RankOf, full_tensors, write
from tests.plant import reference_kernels
from tests.runtime.engine.tensor_ranks import Meeting, MetCollectives

DENSE_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "head_dim": 16,
    "vocab_size": 48,
}
DENSE: dict[str, Any] = TINY | DENSE_SIZES
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_key_value_heads": 8,
    "intermediate_size": 2880 // 5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": DENSE,
    "qwen3-moe": DENSE | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]},
    "gpt-oss": DENSE | GPT_OSS,
}


def write_both(folder: Path, config: dict[str, Any], scheme: Scheme | None) -> tuple[Path, Path]:
    """(folder of codes in three files, folder of the numbers that they mean). None: as gpt-oss ships."""
    tensors = full_tensors(config_from_dict(config))
    if scheme is None:
        said: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "self_attn"]}
        stored, meant = gpt_oss_experts(tensors)
    else:
        stored, meant, said = quantise(tensors, scheme, lambda name: bool(KEPT.search(name)), ignored(tensors))
    coded, plain = folder / "coded", folder / "plain"
    for made in (coded, plain):
        made.mkdir()
    write(coded, stored, files=3, config=config | {"quantization_config": said})
    write(plain, {name: tensor.clone() for name, tensor in meant.items()}, config=config)
    return coded, plain


def check_same(coded: Decoder, plain: Decoder, *, exact: bool = True) -> None:
    """``exact``: bit for bit; otherwise but for the rounding of a reciprocal."""
    found, expected = dict(weights(coded)), dict(weights(plain))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        if exact:
            assert torch.equal(weight.plain(torch.float32), expected[name].data), name
        else:
            torch.testing.assert_close(weight.plain(torch.float32), expected[name].data, rtol=3e-7, atol=0)
    assert any(part.format.code for weight in found.values() for part in weight.parts or (weight,))


@pytest.mark.parametrize("name", schemes())
def test_each_rank_holds_what_the_codes_mean(name: str, tmp_path: Path) -> None:
    """Two ranks have 80 features each: groups of 32 become groups of 16."""
    coded, plain = write_both(tmp_path, MODELS["qwen3"], schemes()[name])
    for rank, size in ((0, 1), (1, 2)):
        check_same(load(coded, rank, size), load(plain, rank, size), exact=name != "nvfp4")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4-zeros", "awq", "gptq", "nvfp4-modelopt", "mxfp4"])
def test_each_rank_holds_its_experts(name: str, tmp_path: Path) -> None:
    coded, plain = write_both(tmp_path, MODELS["qwen3-moe"], schemes()[name])
    for rank, size, whole in ((0, 1, False), (1, 2, False), (1, 2, True)):
        check_same(load(coded, rank, size, whole=whole), load(plain, rank, size, whole=whole))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "whole"), [(1, False), (2, False), (2, True), (4, False)])
def test_experts_of_gpt_oss_stay_codes(size: int, whole: bool, tmp_path: Path) -> None:
    """576 features are 144 on each of four ranks: half of a group of 32 lies on each side of an edge."""
    coded, plain = write_both(tmp_path, MODELS["gpt-oss"], None)
    for rank in range(size):
        found = load(coded, rank, size, whole=whole)
        check_same(found, load(plain, rank, size, whole=whole))
        down = dict(weights(found))["layers.0.mlp.experts.down"]
        assert down.format.name == ("mxfp4_1x16" if size == 4 else "mxfp4_1x32")


FEATURES = {
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 192,
    "mamba_head_dim": 16,
}
OF_FAMILIES = {
    name: config | DENSE_SIZES | {key: size for key, size in FEATURES.items() if key in config}
    for name, config in FP8_MODELS.items()
    if name != "gpt-oss"
}
CASES = [
    pytest.param(model, name, marks=pytest.mark.slow if name == "int4-zeros" else pytest.mark.long)
    for model in OF_FAMILIES
    for name in schemes()
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_every_family_holds_what_the_codes_mean(model: str, name: str, tmp_path: Path) -> None:
    coded, plain = write_both(tmp_path, OF_FAMILIES[model], schemes()[name])
    for rank, size in ((0, 1), (1, 2)):
        check_same(load(coded, rank, size), load(plain, rank, size), exact=name != "nvfp4")


def test_the_page_says_what_is_tried() -> None:
    """Rows of the page, tables of the code, and the cases of this file and test_fp8.py are the same schemes; each of
    every family of the registry."""
    page = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    table = page.partition("| producer |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    said = [set(re.findall(r"`([\w-]+)`", row[1])) for row in rows]
    eight = {*READERS, *ALGORITHMS, *STRATEGIES, "MIXED_PRECISION", "weight_block_size"} - FOUR_BITS.keys()
    assert set().union(*said) == {*eight, *FOUR_BITS, "group"}
    for row, names in zip(rows, said, strict=True):
        of_four = bool(names & FOUR_BITS.keys())
        assert row[2] == ("4" if of_four else "8")
        assert row[4] == ("gpt-oss" if names == {"mxfp4"} else "all")
        assert row[5] == ("8.0" if of_four else f"8.0 ({'.'.join(map(str, FLOAT8_CAPABILITY))})")
    tried: set[str] = set()
    four = [*schemes().values(), *ordered().values()]
    for config in [*(one.config for one in fp8_schemes().values()), *(one.config for one in four)]:
        own = {config["quant_method"], config.get("quant_algo")} - {None}
        own |= {layer["quant_algo"] for layer in config.get("quantized_layers", {}).values()}
        for group in config.get("config_groups", {}).values():
            own |= {group["weights"]["strategy"], config["format"]} - {"tensor_group", "float-quantized"}
        own |= {"weight_block_size"} & config.keys()
        tried |= own
    assert tried | {"mxfp4"} == {*eight, *FOUR_BITS, "group"}
    families = set(ARCHITECTURES.values())
    assert {model_class(str(model["architectures"][0])) for model in FP8_MODELS.values()} == families
    assert {case.values for case in FP8_CASES} == {(model, letter) for model in FP8_MODELS for letter in fp8_schemes()}
    assert OF_FAMILIES.keys() | {"gpt-oss"} == FP8_MODELS.keys()


@pytest.mark.parametrize("name", ordered())
def test_groups_in_an_order_of_their_own_need_one_rank(name: str, tmp_path: Path) -> None:
    coded, plain = write_both(tmp_path, MODELS["qwen3"], ordered()[name])
    check_same(load(coded), load(plain))
    with pytest.raises(WeightsError, match=r"in an order of its own .* columns are split over ranks: use one rank"):
        load(coded, 1, 2)


def test_experts_in_an_order_of_their_own_are_refused(tmp_path: Path) -> None:
    coded, _ = write_both(tmp_path, MODELS["qwen3-moe"], ordered()["gptq-order"])
    with pytest.raises(WeightsError, match=r"in an order of its own \('quant_method' gptq, .* they are experts'"):
        load(coded)


def joined(models: list[Decoder], name: str, features: int, size: int) -> tuple[Tensor, Tensor]:
    """(gate and up [2, features, N], down [N, features]) of all ranks, without what pads them."""
    first, second = list[Tensor](), list[Tensor]()
    for model in models:
        found = dict(weights(model))
        up, down = (found[f"{name}.{part}"].plain(torch.float32) for part in ("gate_up.weight", "down.weight"))
        up = up.view(2, -1, up.shape[1])
        count = (features // 16 * (len(first) + 1) // size - features // 16 * len(first) // size) * 16
        assert up.shape[1] == down.shape[1] == -(-features // 16 // size) * 16
        assert not bool(up[:, count:].any())
        assert not bool(down[:, count:].any())
        first.append(up[:, :count])
        second.append(down[:, :count])
    return torch.cat(first, 1), torch.cat(second, 1)


@pytest.mark.parametrize("size", [4, 8])
def test_edges_that_would_cut_groups_finer_than_16_lie_on_multiples_of_it(size: int, tmp_path: Path) -> None:
    """160 features on 4 or 8 ranks: 40 or 20 each, of groups of 32."""
    coded, plain = write_both(tmp_path, MODELS["qwen3"] | {"num_key_value_heads": 8}, schemes()["mxfp4"])
    whole = dict(weights(load(plain)))
    ranks = [load(coded, rank, size) for rank in range(size)]
    gate_up, down = joined(ranks, "layers.0.mlp", 160, size)
    assert torch.equal(gate_up.flatten(0, 1), whole["layers.0.mlp.gate_up.weight"].data)
    assert torch.equal(down, whole["layers.0.mlp.down.weight"].data)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "gpt-oss"])
def test_an_engine_answers_as_the_numbers_that_codes_mean(model: str, tmp_path: Path) -> None:
    coded, plain = write_both(tmp_path, MODELS[model], None if model == "gpt-oss" else schemes()["awq"])
    assert answers(coded, "auto") == answers(coded, "auto", depth=0) == answers(plain, "auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen3", "int4-zeros"),
        pytest.param("qwen3-moe", "nvfp4-modelopt", marks=pytest.mark.long),
        ("gpt-oss", None),
    ],
)
def test_ranks_choose_the_tokens_of_the_numbers_that_codes_mean(model: str, name: str | None, tmp_path: Path) -> None:
    """One rank and four: on four, shards of 40 and of 24 features begin at multiples of 16."""
    write_both(tmp_path, MODELS[model], schemes()[name] if name else None)
    prompts = [[(7 * row + place) % 48 for place in range(3 + row)] for row in range(16)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    run_models(tmp_path, SingleRank(), 1)
    meeting = Meeting(4)
    with ThreadPoolExecutor(4) as pool:
        ranks = [pool.submit(run_models, tmp_path, MetCollectives(meeting, rank), 1) for rank in range(4)]
        for each in ranks:
            each.result()
    expected = load_file(tmp_path / "plain.tp.1.safetensors")
    found = sorted(tmp_path.glob("coded.*.safetensors"))
    assert len(found) == (2 if model == "qwen3" else 4)  # of several ranks also with whole experts, in two orders
    for file in found:
        for label, result in load_file(file).items():
            if label.endswith("tokens"):
                assert torch.equal(result, expected[label]), (file.name, label)
            if label.endswith("logits"):
                torch.testing.assert_close(result, expected[label], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_mtp_layer_in_its_targets_checkpoint_may_be_of_four_bits(tmp_path: Path) -> None:
    """Its entry projection stays as it is."""
    config = OF_FAMILIES["qwen3-next"] | {"mtp_num_hidden_layers": 1}
    tensors = full_tensors(config_from_dict(config))
    with torch.device("meta"):
        draft = MTPDraft(
            MTPConfig.of_target(config_from_dict(config)),
            ModelContext(SingleRank(), reference_kernels(), torch.float32),
        )
    tensors |= {name: torch.randn(shard.full_shape) * 0.1 for name, shard in draft.checkpoint_shards().items()}
    names = [*ignored(tensors), "mtp.fc"]
    kept = {f"{name}.weight" for name in names}
    stored, meant, said = quantise(tensors, schemes()["nvfp4-modelopt"], lambda name: name in kept, names)
    found = []
    for folder, made, more in (("coded", stored, {"quantization_config": said}), ("plain", meant, {})):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, {name: one.clone() for name, one in made.items()}, files=2, config=config | more)
        found.append(load_own_mtp(load(tmp_path / folder), tmp_path / folder))
    expected = dict(weights(found[1]))
    coded = dict(weights(found[0]))
    assert any(weight.format.code for weight in coded.values())
    for name, weight in coded.items():
        assert torch.equal(weight.plain(torch.float32), expected[name].data), name


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_of_gpt_oss_mean_what_transformers_makes_of_them(size: int) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 6, size, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, size), dtype=torch.uint8)
    weight = Weight(blocks.flatten(2), mxfp4(), scale=scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(weight.plain(torch.float32), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4-zeros", "nvfp4", "mxfp4", "gpt-oss"])
def test_dummy_weights_are_codes_of_one_model(name: str) -> None:
    """Near to dummy numbers, and at two ranks the same codes as at one."""
    said = {"quant_method": "mxfp4"} if name == "gpt-oss" else {**schemes()[name].config, schemes()[name].ignore: []}
    config = config_from_dict(MODELS.get(name, MODELS["qwen3"]) | {"quantization_config": said})
    part = "layers.0.mlp.experts.down" if name == "gpt-oss" else "layers.0.mixer.output.weight"
    found = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        ranks = SingleRank() if size == 1 else RankOf(rank, size)
        model = load_model(config, None, load_format="dummy", collectives=ranks, kernels=reference_kernels())
        found.append(dict(weights(model))[part].plain(torch.float32))
    assert torch.equal(found[0], torch.cat(found[1:], -1))
    assert 0.8 < float(found[0].std()) * found[0].shape[-1] ** 0.5 < 1.2


# -- what is refused ----------------------------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("name", "changes", "said", "words"),
    [
        ("awq", {f"{UP}scales": None}, {}, f"'{UP}qweight' is of four-bit codes, but no file holds its scales ("),
        ("awq", {f"{UP}qzeros": None}, {}, f"no file holds its zeros ('{UP}qzeros'); 'quant_method' awq"),
        ("awq", {f"{UP}qweight": None}, {}, "' is of a matrix of four-bit codes, which no file holds"),
        (
            "awq",
            {f"{UP}scales": torch.ones(3, 160).half()},
            {},
            "is F16 [3, 160], but scales of a matrix [160, 64] with",
        ),
        ("awq", {f"{UP}scales": torch.ones(2, 160).int()}, {}, "are F16 or BF16 or F32 [2, 160]"),
        ("awq", {f"{UP}scales": torch.full((2, 160), float("nan"))}, {}, f"'{UP}scales': a scale is not finite"),
        ("awq", {}, {"modules_to_not_convert": ["mlp.up_proj"]}, "entry 'mlp.up_proj' leaves it as it is"),
        ("awq", {}, {"quant_method": "fp8"}, "that no file holds (model.safetensors): 'model.layers.0.mlp.down_proj"),
        (
            "gptq",
            {f"{UP}qzeros": torch.zeros(2, 20).int()},
            {},
            "zeros are neither all 7 nor all 8, but the matrix has",
        ),
        ("mxfp4", {f"{UP}weight_scale": torch.full((160, 2), 255).byte()}, {}, "a scale is 255, which stands for no"),
        ("mxfp4", {f"{UP}weight_scale": torch.full((160, 2), 131).byte()}, {}, "a scale is 131; supported: up to 130"),
        ("mxfp4", {f"{UP}weight_scale": torch.ones(160, 2)}, {}, "is F32 [160, 2], but scales of a matrix [160, 64]"),
        ("nvfp4", {f"{UP}weight_global_scale": torch.zeros(1)}, {}, "holds a number that is not finite and positive"),
        ("nvfp4", {f"{UP}weight_global_scale": None}, {}, "no file holds its second scale ("),
        ("gptq-order", {f"{UP}g_idx": torch.ones(64).int()}, {}, f"'{UP}g_idx' does not give 32 columns to each group"),
    ],
)
def test_contradictions_name_file_tensor_and_entry(
    name: str, changes: dict[str, Tensor | None], said: dict[str, Any], words: str, tmp_path: Path
) -> None:
    coded, _ = write_both(tmp_path, MODELS["qwen3"], {**schemes(), **ordered()}[name])
    change(coded, changes, said)
    with pytest.raises(WeightsError, match=re.escape(words)) as caught:
        load(coded)
    assert "model.safetensors" in str(caught.value)


def test_a_head_of_four_bits_is_refused(tmp_path: Path) -> None:
    tensors = full_tensors(config_from_dict(MODELS["qwen3"]))
    stored, _, said = quantise(tensors, schemes()["awq"], lambda name: "embed" in name, ["embed_tokens"])
    write(tmp_path, stored, config=MODELS["qwen3"] | {"quantization_config": said})
    with pytest.raises(WeightsError, match=r"'lm_head.weight' is of four bits, but routers, embeddings and heads"):
        load(tmp_path)


def test_heads_that_would_cut_groups_are_refused_by_size(tmp_path: Path) -> None:
    config = MODELS["qwen3"] | {"head_dim": 8, "num_key_value_heads": 8}
    coded, _ = write_both(tmp_path, config, schemes()["mxfp4"])
    with pytest.raises(WeightsError, match=r"64 columns in groups of 32 .* a rank would have 8: use a tensor-parallel"):
        load(coded, 0, 8)
