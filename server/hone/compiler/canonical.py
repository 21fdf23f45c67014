"""The same computation under the same names: canonical form of a graph, and its digest.

Values are named by their place in a walk from the outputs to the inputs, so neither the names inside a model nor the
order in which its nodes are listed change what the compiler sees, nor the digest that caches go by.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from hone.compiler.onnx_graph import Graph, subgraphs
from hone.types import Array

#: Goes into every digest: raise it when the same digest would stand for another meaning.
_SCHEMA = 1


def digest_tensor(array: Array) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes, in hexadecimal."""
    digest = hashlib.sha256(f"{array.dtype.name}{list(array.shape)}".encode())
    contiguous = np.ascontiguousarray(array)
    digest.update(contiguous.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def canonicalize(graph: Graph) -> dict[str, str]:
    """Rename values to `i0…` (inputs), `w0…` (weights), `c0…` and `v0…`. Gives old -> new.

    Outputs keep their names out of the graph: the model's outputs become values as any other, in the same order. The
    graph must hold no subgraphs.
    """
    if any(subgraphs(node) for node in graph.nodes):
        raise ValueError("a graph with subgraphs has no canonical form")
    constants = {tensor.name: tensor for tensor in graph.model.graph.initializer}
    names = {name: f"i{number}" for number, name in enumerate(graph.input_names)}
    counts = {"w": 0, "c": 0, "v": 0}

    def name_of(old: str) -> str:
        if old and old not in names:
            kind = "w" if old in graph.weights else "c" if old in constants else "v"
            names[old] = f"{kind}{counts[kind]}"
            counts[kind] += 1
        return names.get(old, "")

    renamed = []
    for node in graph.nodes:  # ordered by need, as always
        inputs = [name_of(name) for name in node.input]
        outputs = [name_of(name) for name in node.output]
        copy = helper.make_node(node.op_type, inputs, outputs, domain=node.domain)
        copy.attribute.extend(sorted(node.attribute, key=lambda item: item.name))
        renamed.append(copy)

    form = graph.model.graph
    made = [_renamed(value, name_of(value.name)) for value in form.output]
    weights = sorted((name for name in graph.weights if name in names), key=lambda name: int(names[name][1:]))
    listed = {value.name: value for value in form.input}
    model = ModelProto(ir_version=graph.model.ir_version, opset_import=graph.model.opset_import)
    model.graph.name = "model"
    model.graph.node.extend(renamed)
    model.graph.input.extend(_renamed(listed[name], names[name]) for name in (*graph.input_names, *weights))
    model.graph.output.extend(made)
    for name in sorted((name for name in constants if name in names), key=lambda name: int(names[name][1:])):
        model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(constants[name]), names[name]))
    graph.weights = {names[name]: graph.weights[name] for name in weights}
    graph.input_names = tuple(names[name] for name in graph.input_names)
    graph.replace_model(model)
    return names


def digest_graph(graph: Graph, inputs: list[str], outputs: list[str], weights: dict[str, str]) -> str:
    """Digest of a canonical graph: interface, operators, constants, and the digests of its weights by name."""
    form = graph.model.graph
    described = {
        "schema": _SCHEMA,
        "opsets": sorted([entry.domain, entry.version] for entry in graph.model.opset_import),
        "inputs": [
            [name, value.type.SerializeToString(deterministic=True).hex()]
            for name, value in zip(inputs, form.input, strict=False)
        ],
        "outputs": [[name, value.name] for name, value in zip(outputs, form.output, strict=True)],
        "nodes": [_described(node) for node in form.node],
        "constants": [[tensor.name, digest_tensor(numpy_helper.to_array(tensor))] for tensor in form.initializer],
        "weights": sorted(weights.items()),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _described(node: NodeProto) -> list[object]:
    attributes = []
    for item in node.attribute:
        value = helper.get_attribute_value(item)
        if isinstance(value, TensorProto):
            described = digest_tensor(numpy_helper.to_array(value))
        else:
            described = item.SerializeToString(deterministic=True).hex()
        attributes.append([item.name, described])
    return [node.domain, node.op_type, list(node.input), list(node.output), attributes]


def _renamed(value: ValueInfoProto, name: str) -> ValueInfoProto:
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    copy.name = name
    copy.ClearField("doc_string")
    return copy
