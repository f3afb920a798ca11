"""A recorded loader puts the same bits into the same cells as the loader itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import NAN, Engine, bits, fill

import shardwise as sw

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def recorded_equals_loaded(load, shapes, parameters, **options):
    """The loader itself, and what was recorded of it, fill the parameters with the same bits."""
    torch.manual_seed(0)
    values = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in shapes.items()}
    load((name, value.clone()) for name, value in values.items())
    expected = [bits(parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.fill_(NAN)
    recorded = sw.engines.record(load, shapes, strict=False, **options)
    fill(recorded, values)
    for parameter, wanted in zip(parameters, expected, strict=True):
        assert bits(parameter) == wanted
    return recorded


@st.composite
def loaders(draw):
    """A loader that puts some tensors together in random ways and writes them to random places of a parameter."""
    shape = (draw(st.integers(1, 4)), draw(st.sampled_from([2, 4, 6])))
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    shapes = {name: (shape, draw(st.sampled_from(DTYPES))) for name in names}
    steps = draw(
        st.lists(
            st.sampled_from(
                [
                    "t",
                    "flat",
                    "cat",
                    "stack",
                    "half",
                    "clone",
                    "cast",
                    "pad",
                    "zero",
                    "select",
                    "neg",
                    "rows",
                    "into",
                    "expand",
                ]
            ),
            max_size=6,
        )
    )
    casts = [draw(st.sampled_from(DTYPES)) for _ in steps]
    parameter = torch.full((30, 6), NAN, dtype=draw(st.sampled_from(DTYPES)))
    target = parameter.view(6, 30).t() if draw(st.booleans()) else parameter

    def changed(tensor):
        for step, dtype in zip(steps, casts, strict=True):
            if step == "t" and tensor.dim() == 2:
                tensor = tensor.t()
            elif step == "flat":
                tensor = tensor.reshape(-1)
            elif step == "cat":
                tensor = torch.cat([tensor, tensor.narrow(0, 0, 1).to(dtype)])
            elif step == "stack":
                tensor = torch.stack([tensor, tensor], dim=-1).flatten(-2)
            elif step == "half":
                tensor = tensor.chunk(2, dim=-1)[-1]
            elif step == "clone":
                tensor = tensor.clone()
            elif step == "cast":
                tensor = tensor.to(dtype)
            elif step == "pad":
                tensor = torch.nn.functional.pad(tensor, (1, -1), value=2.5)
            elif step == "zero" and tensor.numel():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                tensor.view(-1)[: tensor.numel() // 2].zero_()
            elif step == "select" and tensor.dim() == 2:
                tensor = tensor[torch.arange(tensor.shape[0] - 1, -1, -1)]
            elif step == "neg":
                tensor = -tensor
            elif step == "rows" and tensor.dim() == 2:
                tensor = tensor[::2]
            elif step == "into":
                buffer = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
                buffer[1 : tensor.numel() + 1] = tensor.reshape(-1)
                tensor = buffer
            elif step == "expand" and tensor.numel() < 9:
                tensor = tensor.reshape(1, -1).expand(2, -1).reshape(-1)
        return tensor

    def load(weights):
        for name, tensor in weights:
            flat = changed(tensor).reshape(-1)[:30]
            rows = len(flat) // 6
            place = target["abc".index(name) * 10 :][:10]
            place[:rows].copy_(flat[: rows * 6].reshape(rows, 6))
            place[9, : len(flat) - rows * 6].copy_(flat[rows * 6 :])

    return load, shapes, parameter


@settings(max_examples=120, deadline=None)
@given(loaders())
def test_any_loader_is_followed_or_called(drawn):
    load, shapes, parameter = drawn
    recorded_equals_loaded(load, shapes, [parameter])


def test_an_engine_is_filled_as_by_its_own_loader():
    engine, reference = Engine(), Engine()
    reference.load_weights(Engine.values().items())
    recorded = sw.engines.record(engine.load_weights, Engine.like())
    fill(recorded, Engine.values())
    engine.assert_equals(reference)


def test_a_recording_changes_no_parameter_but_writes_constants():
    engine = Engine()
    sw.engines.record(engine.load_weights, Engine.like())
    assert engine.qkv.isnan().all()
    assert engine.emb[:11].isnan().all()
    assert bits(engine.emb[11:]) == bits(torch.zeros(1, 6))


def test_what_a_live_engine_holds_survives_a_loader_that_clears_parameters_first():
    weight = torch.nn.Parameter(torch.ones(4, 2))
    module = torch.nn.Module()
    module.weight = weight

    def load(weights):
        weight.data.zero_()
        for _, tensor in weights:
            weight.data[:3].copy_(tensor)

    sw.engines.record(load, {"w": ((3, 2), torch.float32)}, module=module)
    assert weight.tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]


def test_explain_says_for_every_name_how_it_is_loaded_and_why():
    explanation = sw.engines.explain(sw.engines.record(Engine().load_weights, Engine.like()))
    assert explanation.direct == ["q", "k", "v", "down", "emb", "norm"]
    assert explanation.through_loader == {"A": "it goes through aten.exp"}
    assert explanation.unused == ["unused"]
    text = str(explanation)
    assert "q  8x6 float32  direct: rank 0 [0:8, 0:6]" in text
    assert "down  8x6 bfloat16  direct" in text
    assert "unused  3 float32  not used" in text
    whole = sum(4 * torch.Size(shape).numel() for shape in Engine.shapes.values())
    assert explanation.bytes_whole == whole - 2 * 48  # one of them is kept as bfloat16
    assert explanation.bytes == explanation.bytes_whole - 4 * 3


def test_names_whose_values_the_loader_looks_at_go_through_it_in_all_layers():
    scales = {f"layers.{n}.scale": torch.full((), NAN) for n in range(3)}
    weights = {f"layers.{n}.weight": torch.full((2, 2), NAN) for n in range(3)}

    def load(given):
        for name, tensor in given:
            (scales[name].fill_(tensor.item()) if name in scales else weights[name].copy_(tensor))

    shapes = {name: (tuple(t.shape), t.dtype) for name, t in {**scales, **weights}.items()}
    recorded = recorded_equals_loaded(load, shapes, [*scales.values(), *weights.values()])
    assert set(recorded.explanation.through_loader) == set(scales)
    assert set(recorded.explanation.direct) == set(weights)


@pytest.mark.parametrize("look", [lambda t: t.tolist(), lambda t: t.numpy(), lambda t: bool((t > 0).any())])
def test_every_way_to_look_at_values_is_noticed(look):
    weight = torch.full((2,), NAN)

    def load(given):
        for _, tensor in given:
            look(tensor)
            weight.copy_(tensor)

    assert list(recorded_equals_loaded(load, {"w": ((2,), torch.float32)}, [weight]).explanation.through_loader) == [
        "w"
    ]


def test_names_that_are_computed_from_each_other_reach_the_loader_together():
    weight = torch.full((2,), NAN)

    def load(given):
        parts = dict(given)
        if parts:
            weight.copy_(parts["a"] * parts["b"])

    shapes = dict.fromkeys("ab", ((2,), torch.float32))
    recorded = recorded_equals_loaded(load, shapes, [weight])
    assert recorded["a"].delivery.names == ("a", "b")


def test_values_that_are_rounded_twice_go_through_the_loader():
    wide = torch.full((4,), NAN)

    def load(given):
        for _, tensor in given:
            wide.copy_(tensor.to(torch.bfloat16))

    recorded = recorded_equals_loaded(load, {"w": ((4,), torch.float32)}, [wide])
    assert "rounded" in recorded.explanation.through_loader["w"]


def test_a_loader_that_gives_parameters_other_memory_is_followed():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.full((3, 2), NAN, device="meta"))

    def load(given):
        for _, tensor in given:
            module.weight.data = tensor.t()

    recorded = sw.engines.record(load, {"w": ((2, 3), torch.float32)}, module=module)
    module.weight = torch.nn.Parameter(torch.full((3, 2), NAN))
    recorded.resolve()
    values = {"w": torch.randn(2, 3)}
    fill(recorded, values)
    assert module.weight.equal(values["w"].t())


def test_cells_that_no_rank_needs_get_memory_of_their_own():
    weight = torch.full((3, 2), NAN)

    def load(given):
        for _, tensor in given:
            weight.copy_(tensor[:3])

    recorded = recorded_equals_loaded(load, {"w": ((5, 2), torch.float32)}, [weight])
    assert [tuple(shard.shape) for shard in recorded["w"].shards] == [(3, 2), (2, 2)]
    recorded["w"].layout.validate()


def test_ten_thousand_experts_are_recorded():
    stacked = torch.nn.ParameterList(torch.empty(64, 8, 4) for _ in range(8))

    def load(given):
        for name, tensor in given:
            layer, expert, half = map(int, name.split("."))
            stacked[layer].data[expert, 4 * half :][:4].copy_(tensor)

    names = [f"{layer}.{expert}.{half}" for layer in range(8) for expert in range(64) for half in range(2)]
    recorded = sw.engines.record(load, dict.fromkeys(names, ((4, 4), torch.float32)), module=stacked)
    fill(recorded, {name: torch.full((4, 4), float(at)) for at, name in enumerate(names)})
    assert stacked[7][63, 4:].tolist() == [[float(len(names) - 1)] * 4] * 4
    assert recorded.explanation.direct == names


def parameters(**tensors):
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def test_constants_stay_what_they_were_when_the_loader_copied_them():
    weight = torch.full((8,), NAN)

    def load(given):
        one, several = torch.zeros(1), torch.zeros(2)
        for _, tensor in given:
            weight[:1].copy_(one)
            weight[1:3].copy_(several)
            one.fill_(5)
            several.add_(torch.tensor([1.0, 2.0]))
            weight[3:4].copy_(one)
            weight[4:].copy_(torch.cat([several, tensor]))
            several.zero_()

    recorded = recorded_equals_loaded(load, {"w": ((2,), torch.float32)}, [weight])
    assert recorded.explanation.direct == ["w"]


@pytest.mark.parametrize("turn", ["source", "target"])
def test_conjugates_go_through_the_loader(turn):
    weight = torch.zeros(2, dtype=torch.complex64)

    def load(given):
        for _, tensor in given:
            weight.copy_(tensor.conj()) if turn == "source" else weight.conj().copy_(tensor)

    recorded = sw.engines.record(load, {"w": ((2,), torch.complex64)})
    fill(recorded, {"w": torch.tensor([1 + 2j, 3 - 4j])})
    assert weight.tolist() == [1 - 2j, 3 + 4j]


@pytest.mark.parametrize("look", [lambda t: t.numpy(), lambda t: t.tolist()])
@pytest.mark.parametrize("staged", [False, True])
def test_looks_are_noticed_in_staged_values_and_where_the_error_is_caught(look, staged):
    weight = torch.full((2,), NAN)

    def load(given):
        for _, tensor in given:
            try:
                values = torch.tensor(look(torch.zeros(2).copy_(tensor) if staged else tensor))
            except Exception:
                values = torch.ones(2)
            weight.copy_(values * 2)

    recorded = recorded_equals_loaded(load, {"w": ((2,), torch.float32)}, [weight])
    assert list(recorded.explanation.through_loader) == ["w"]


def test_parameters_that_the_loader_ties_are_all_filled():
    module = parameters(embed=torch.full((2,), NAN), head=torch.full((2,), NAN))

    def load(given):
        for _, tensor in given:
            module.embed.data.copy_(tensor)
        module.head = module.embed

    recorded = sw.engines.record(load, {"w": ((2,), torch.float32)}, module=module)
    fill(recorded, {"w": torch.ones(2)})
    assert module.head.tolist() == module.embed.tolist() == [1.0, 1.0]


def test_a_live_engine_keeps_its_views_and_gets_no_new_parameters():
    module = parameters(weight=torch.arange(4.0).view(2, 2))

    def load(given):
        for _, tensor in given:
            module.weight.data = module.weight.data.t()
            module.weight.data.copy_(tensor)
            if len(list(module.parameters())) > 1 or tensor.dtype == torch.float64:
                module.extra = torch.nn.Parameter(tensor)

    recorded = sw.engines.record(load, {"w": ((2, 2), torch.float32)}, module=module)
    assert module.weight.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    fill(recorded, {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    assert module.weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(sw.EngineError, match="'extra'"):
        sw.engines.record(load, {"w": ((2, 2), torch.float64)}, module=module)
    assert [name for name, _ in module.named_parameters()] == ["weight"]


def test_several_parts_of_memory_that_is_no_parameter_are_filled():
    memory = torch.full((8,), NAN)

    def load(given):
        for name, tensor in given:
            memory[4 * "ab".index(name) :][:4].data.copy_(tensor)

    shapes = dict.fromkeys("ab", ((4,), torch.float32))
    assert recorded_equals_loaded(load, shapes, [memory]).explanation.direct == ["a", "b"]


def clears_first(given, weight):
    weight.zero_()
    for name, tensor in given:
        weight[:2].copy_(tensor) if name == "a" else weight[2:].copy_(-tensor)


def waits_for_all_parts(given, weight):
    parts = dict(given)
    if {"a", "b"} <= parts.keys():
        weight.copy_(torch.cat([parts["a"], -parts["b"]]))


def fails_without_the_other(given, weight):
    parts = dict(given)
    weight[:2].copy_(parts["a"])
    weight[2:].copy_(-parts["b"])


@pytest.mark.parametrize("work", [clears_first, waits_for_all_parts, fails_without_the_other])
def test_names_that_a_loader_needs_together_are_handed_over_together(work):
    weight = torch.full((4, 2), NAN)
    shapes = dict.fromkeys("ab", ((2, 2), torch.float32))
    recorded = recorded_equals_loaded(lambda given: work(given, weight), shapes, [weight])
    assert set(recorded["b"].delivery.names) == {"a", "b"}


def test_one_layer_stands_for_the_others_when_names_belong_together():
    weights = torch.full((3, 4, 2), NAN)

    def load(given):
        for name, tensor in given:
            layer, part = name.split(".")
            weights[int(layer)][:2].copy_(tensor) if part == "a" else weights[int(layer)][2:].copy_(-tensor)

    shapes = {f"{layer}.{part}": ((2, 2), torch.float32) for layer in range(3) for part in "ab"}
    recorded = recorded_equals_loaded(load, shapes, [weights])
    assert recorded.explanation.direct == ["0.a", "1.a", "2.a"]
    assert recorded["1.b"].delivery.names == ("1.b",)


def test_a_tensor_that_the_loader_keeps_as_an_attribute_goes_through_it():
    module = torch.nn.Module()
    module.weight, module.scale = torch.nn.Parameter(torch.full((2,), NAN)), None

    def load(given):
        for name, tensor in given:
            if name == "w":
                module.weight.data.copy_(tensor)
            else:
                module.scale = tensor * 1

    recorded = sw.engines.record(load, dict.fromkeys("ws", ((2,), torch.float32)), module=module)
    assert module.scale is None
    assert recorded.explanation.through_loader == {"s": "the loader keeps it as attribute 'scale'"}
    fill(recorded, {"w": torch.ones(2), "s": torch.full((2,), 3.0)})
    assert module.scale.tolist() == [3.0, 3.0]


def test_padding_that_is_made_beside_the_tensors_is_followed():
    weight = torch.full((4, 2), NAN)

    def load(given):
        for _, tensor in given:
            weight.copy_(torch.cat([tensor, torch.zeros(1, 2, device=tensor.device), tensor.new_ones(1, 2)]))

    recorded = recorded_equals_loaded(load, {"w": ((2, 2), torch.float32)}, [weight])
    assert recorded.explanation.direct == ["w"]


def test_values_that_became_constants_still_go_through_the_loader_by_name():
    weight = torch.full((2,), NAN)

    def load(given):
        for _, tensor in given:
            weight.copy_(-tensor.zero_())

    recorded = recorded_equals_loaded(load, {"w": ((2,), torch.float32)}, [weight])
    assert list(recorded.explanation.through_loader) == ["w"]
