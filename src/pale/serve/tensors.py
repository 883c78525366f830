"""Tensors of the Open Inference Protocol, version 2: bodies of requests to arrays, and arrays to bodies of responses.

A body is JSON, or JSON followed by the data of tensors as bytes (the binary tensor data extension): then the header
Inference-Header-Content-Length gives the length of the JSON. Everything that a request states is compared with the
received bytes before it is used.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .limits import RefusedError

DATATYPES: dict[str, Any] = {
    "FP32": np.dtype(np.float32),
    "INT64": np.dtype(np.int64),
    "UINT8": np.dtype(np.uint8),
    "BYTES": np.dtype(object),
}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
MAX_ID = 200  # characters of the id of a request
MAX_QUOTED = 60  # characters of a request that an error message repeats
# Bytes of Python objects for each byte of JSON: an empty table with its comma has three.
PARSED_BYTES = 26
LENGTH = struct.Struct("<I")  # before each element of a binary tensor of type BYTES


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model, as its metadata describes it; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def plain(self) -> dict[str, Any]:
        """Return the values as a JSON object."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True)
class InputTensor:
    """An input of a request; `data` is a list from JSON, or bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any] | memoryview


@dataclass(frozen=True)
class InferRequest:
    """A request.

    Attributes:
        id: id of the request, if any; repeated in the response.
        input: the only input.
        outputs: names of the requested outputs, and whether they are sent as bytes; None: all.
        binary: whether outputs are sent as bytes if `outputs` is None.
    """

    id: str | None
    input: InputTensor
    outputs: dict[str, bool] | None
    binary: bool

    def requested(self, names: Sequence[str]) -> dict[str, bool]:
        """Return which of the model's outputs are requested, and whether as bytes."""
        if self.outputs is None:
            return dict.fromkeys(names, self.binary)
        for name in self.outputs:
            if name not in names:
                refuse(f"the model has no output {quoted(name)}; it has {', '.join(names)}")
        return self.outputs


def refuse(message: str) -> NoReturn:
    """Raise the error of a request that does not follow the protocol."""
    raise RefusedError(400, message)


def quoted(value: object) -> str:
    """Return a value from a request for a message, shortened."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


def json_length(header: str | None, size: int) -> int:
    """Return how many bytes of a body are JSON.

    Args:
        header: value of Inference-Header-Content-Length; None: not sent.
        size: size of the body.
    """
    if header is None:
        return size
    if not header.isascii() or not header.isdigit() or len(header) > 12 or int(header) > size:
        refuse(
            f"Inference-Header-Content-Length must be a number of bytes of the body, which has {size:,}, "
            f"got {quoted(header)}"
        )
    return int(header)


def parse_request(content: bytes, length: int) -> InferRequest:
    """Return the request of a body whose first `length` bytes are JSON."""
    try:
        parsed = json.loads(content[:length].decode(), parse_constant=_no_constant)
    except RecursionError:
        refuse("the JSON of the request is nested too deeply")
    except ValueError as error:  # also for invalid UTF-8, and numbers with too many digits
        reason = str(error).splitlines()[0][:MAX_QUOTED] if str(error) else type(error).__name__
        refuse(f"the request is not valid JSON: {reason}")
    table = _table(parsed, "the request")
    inputs = table.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1:
        refuse("inputs must be a list of one tensor")
    parameters = _table(table.get("parameters", {}), "parameters")
    name = table.get("id")
    if name is not None and (not isinstance(name, str) or len(name) > MAX_ID):
        refuse(f"id must be text of at most {MAX_ID} characters")
    return InferRequest(
        name or None,
        _input(_table(inputs[0], "the input"), memoryview(content)[length:]),
        _outputs(table.get("outputs"), parameters),
        _flag(parameters, "binary_data_output", False),
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid in JSON")


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(f"{what} must be a JSON object, got {quoted(value)}")
    return value


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        refuse(f"{name} must be true or false, got {quoted(value)}")
    return value


def _input(table: dict[str, Any], rest: memoryview) -> InputTensor:
    for key in ("name", "datatype"):
        if not isinstance(table.get(key), str):
            refuse(f"the {key} of the input must be text, got {quoted(table.get(key))}")
    parameters = _table(table.get("parameters", {}), "the parameters of the input")
    if any(key.startswith("shared_memory") for key in parameters):
        refuse("shared memory is not supported; send the data in the request")
    size = parameters.get("binary_data_size")
    data: Any = table.get("data")
    if size is None:
        if not isinstance(data, list):
            refuse(f"the data of the input must be a list, got {quoted(data)}")
        size = 0
    elif data is not None:
        refuse("the input has both data and binary_data_size; send one of them")
    elif type(size) is not int:
        refuse(f"binary_data_size must be a number of bytes, got {quoted(size)}")
    else:
        data = rest
    if size != len(rest):
        refuse(f"the input has {quoted(size)} bytes after the JSON, but {len(rest):,} arrived")
    return InputTensor(table["name"], table["datatype"], _shape(table.get("shape")), data)


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= 8:
        refuse(f"the shape of the input must be a list of 1 to 8 sizes, got {quoted(value)}")
    if not all(type(size) is int and 1 <= size < 2**31 for size in value):
        refuse(f"the sizes of a shape must be integers from 1, got {quoted(value)}")
    return tuple(value)


def _outputs(value: Any, parameters: Mapping[str, Any]) -> dict[str, bool] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) > 64:
        refuse(f"outputs must be a list of at most 64 outputs, got {quoted(value)}")
    default = _flag(parameters, "binary_data_output", False)
    found: dict[str, bool] = {}
    for each in value:
        table = _table(each, "an output")
        name = table.get("name")
        if not isinstance(name, str) or name in found:
            refuse(f"each output needs a name of its own, got {quoted(name)}")
        asked = _table(table.get("parameters", {}), "the parameters of an output")
        if "classification" in asked:
            refuse("the classification extension is not supported; use the output with class names")
        if any(key.startswith("shared_memory") for key in asked):
            refuse("shared memory is not supported; outputs are sent in the response")
        found[name] = _flag(asked, "binary_data", default)
    return found


def as_floats(tensor: InputTensor) -> NDArray[np.float32]:
    """Return the finite numbers of a tensor of type FP32; its shape was checked before."""
    count = math.prod(tensor.shape)
    if isinstance(tensor.data, memoryview):
        if len(tensor.data) != 4 * count:
            refuse(
                f"an FP32 tensor of shape {list(tensor.shape)} has {4 * count:,} bytes, but "
                f"{len(tensor.data):,} arrived"
            )
        found = np.frombuffer(tensor.data, "<f4").astype(np.float32)
    else:
        flat = _flat(tensor.data, count)
        if not all(type(value) in (int, float) for value in flat):
            refuse("the data of an FP32 tensor must be numbers")
        try:
            with np.errstate(over="ignore"):
                found = np.array(flat, np.float64).astype(np.float32)
        except OverflowError:
            refuse("a number is too large for FP32")
    if not np.isfinite(found).all():
        refuse("the tensor has NaN or infinite values, or values that are too large for FP32")
    return found.reshape(tensor.shape)


def as_files(tensor: InputTensor) -> list[bytes]:
    """Return the elements of a tensor of type BYTES: with their lengths as bytes, or in base64 as JSON."""
    count = math.prod(tensor.shape)
    if not isinstance(tensor.data, memoryview):
        return [_decode_text(value) for value in _flat(tensor.data, count)]
    found: list[bytes] = []
    at = 0
    for _ in range(count):
        end = at + LENGTH.size
        if end > len(tensor.data):
            refuse(f"the data ends before element {len(found)} of {count}")
        start, end = end, end + LENGTH.unpack(tensor.data[at:end])[0]
        if end > len(tensor.data):
            refuse(f"element {len(found)} of {count} has {end - start:,} bytes, more than arrived")
        found.append(bytes(tensor.data[start:end]))
        at = end
    if at != len(tensor.data):
        refuse(f"{len(tensor.data) - at:,} bytes follow the last of {count} elements")
    return found


def _flat(data: list[Any], count: int) -> list[Any]:
    """Return the elements of nested lists in their order; raise RefusedError if there are more or fewer."""
    flat, level = data, 0
    while any(isinstance(value, list) for value in flat):
        level += 1
        if level > 8 or not all(isinstance(value, list) for value in flat):
            refuse("the data must be one list, or lists nested like the shape")
        flat = [value for each in flat for value in each]
    if len(flat) != count:
        refuse(f"the shape has {count:,} elements, but the data {len(flat):,}")
    return flat


def _decode_text(value: object) -> bytes:
    if not isinstance(value, str):
        refuse(f"the data of a BYTES tensor must be text in base64, got {quoted(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        refuse("the data of a BYTES tensor in JSON must be base64; or send it as binary data")


def encode_response(
    about: dict[str, Any], outputs: Mapping[str, NDArray[Any]], requested: Mapping[str, bool]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON if bytes follow it.

    Args:
        about: name and version of the model, id of the request.
        outputs: all outputs of the model.
        requested: names of those to send, and whether as bytes.
    """
    described, parts = [], []
    for name, binary in requested.items():
        array = outputs[name]
        entry: dict[str, Any] = {
            "name": name,
            "datatype": NAMES[array.dtype],
            "shape": list(array.shape),
        }
        if binary:
            raw = _raw(array)
            parts.append(raw)
            entry["parameters"] = {"binary_data_size": len(raw)}
        elif array.dtype == object:
            entry["data"] = [value.decode() for value in array.flat]
        else:
            entry["data"] = array.ravel().tolist()
        described.append(entry)
    head = json.dumps(about | {"outputs": described}, allow_nan=False, separators=(",", ":"))
    return b"".join([head.encode(), *parts]), len(head.encode()) if parts else None


def _raw(array: NDArray[Any]) -> bytes:
    if array.dtype == object:
        return b"".join(LENGTH.pack(len(value)) + value for value in array.flat)
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
