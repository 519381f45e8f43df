"""Contract: compares the inputs and outputs of a TensorRT engine with the manifest."""

from __future__ import annotations

from typing import Any

from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.signature import Signature, Tensor
from spaceport.runtime.backends.built import Named
from spaceport.runtime.bundle import BundleError

_PROFILES = 2


def check_contract(api: Any, engine: Any, signature: Signature, named: Named) -> None:
    """Raise if an engine differs from its record in the manifest, or does not update its KV buffers in place."""
    got = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    expected = {tensor.name for tensor in (*signature.inputs, *signature.outputs)}
    if got != expected:
        raise _broken(named, f"its tensors are not the contract's ({', '.join(sorted(got ^ expected)[:4])})")
    if engine.num_optimization_profiles != _PROFILES:
        raise _broken(named, f"it has {engine.num_optimization_profiles} profiles, {_PROFILES} are expected")
    for tensors, mode in ((signature.inputs, "INPUT"), (signature.outputs, "OUTPUT")):
        for tensor in tensors:
            if fault := _fault(api, engine, tensor, mode, named.record.capacity):
                raise _broken(named, f"{tensor.name} {fault}")
    for past, present in zip(signature.past, signature.present, strict=True):
        if (alias := engine.get_aliased_input_tensor(present.name)) != past.name:
            raise _broken(named, f"{present.name} is not written in place of {past.name} (but of {alias})")


def _fault(api: Any, engine: Any, tensor: Tensor, mode: str, capacity: int) -> str | None:
    if engine.get_tensor_mode(tensor.name) != getattr(api.TensorIOMode, mode):
        return f"is no {mode.lower()}"
    if engine.get_tensor_location(tensor.name) != api.TensorLocation.DEVICE:
        return "is read on the host"
    kind, expected = engine.get_tensor_dtype(tensor.name), DTYPES[tensor.dtype].tensorrt
    if kind != getattr(api.DataType, expected):
        return f"has the type {kind}, {expected} is expected"
    shape = tuple(engine.get_tensor_shape(tensor.name))
    sizes = tuple(capacity if size == "S" else -1 if isinstance(size, str) else size for size in tensor.shape)
    return None if shape == sizes else f"has the shape {shape}, {sizes} is expected"


def _broken(named: Named, fault: str) -> BundleError:
    return BundleError(f"engine {named.name}: {fault}: build it again with `spaceport build`")
