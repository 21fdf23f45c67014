"""What `hone kernels build` builds ahead of any model is what models call once they are partitioned."""

from __future__ import annotations

import onnx
import pytest

from benchmarks import cpu_transformers
from benchmarks.cpu_convnets import repvgg_a0, resnet50
from hone.compiler.choices import Choices
from hone.compiler.cuda.partition import takers
from hone.compiler.cuda.pipeline import cuda_workloads
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.phases.precision import Precision
from hone.compiler.templates.cutlass.prebuild import DTYPES, FAMILIES, plan
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from tests.cutlass import models

IMAGES = {"image": (8, 3, 224, 224)}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """ResNet-50, RepVGG-A0 and a layer of BERT-base, at their sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_transformers, "_BERT_LAYERS", 1)
        nets = {"resnet50": resnet50(), "repvgg_a0": repvgg_a0(), "bert": cpu_transformers.bert_base()}
    found = {}
    for name, proto in nets.items():
        path = tmp_path_factory.mktemp(name) / "model.onnx"
        onnx.save(proto, path)
        shapes = {value.name: IMAGES.get(value.name, (8, 128)) for value in proto.graph.input}
        model = import_model(path, shapes)
        assert isinstance(model, ImportedModel), model
        found[name] = model
    return found


def prebuilt(target, dtype):
    planned = plan(target, FAMILIES, (dtype,))
    return {one.template.digest(one.workload, one.candidate, target) for one in planned}


def calls_of(model, target, dtype, there):
    """How many calls there are, how many of them find a kernel, and how many find the one they would have first."""
    wanted = cuda_workloads(model, target, Choices(precision=Precision(dtype)))
    total = found = first = 0
    for workload, count in wanted.counts.items():
        guesses = [
            template.digest(workload, candidate, target)
            for template in takers(workload, target, CUTLASS_TEMPLATES)
            for candidate in template.candidates(workload, target)
        ]
        total += count
        found += count * any(guess in there for guess in guesses)
        first += count * (guesses[0] in there)
    return total, found, first


@pytest.mark.parametrize("arch, dtype", [("80", "f16"), ("90a", "f16"), ("86", "tf32")])
def test_every_layer_of_common_nets_has_kernels_that_were_built_before(imported, arch, dtype):
    target = CudaTarget.typical(arch)
    there = prebuilt(target, dtype)
    for name, model in imported.items():
        total, found, first = calls_of(model, target, dtype, there)
        assert total >= 7
        assert found == total, f"{name}: {total - found} of {total} calls find no kernel"
        assert first >= (total / 3 if dtype == "f16" else 1), f"{name}: {first} of {total} first guesses are there"


def test_layers_of_a_quantised_net_share_kernels(tmp_path):
    """Scales differ from layer to layer, and are inputs of kernels."""
    model, target = models.quantized(tmp_path), CudaTarget.typical("80")
    source = import_model(model.path, model.shapes)
    wanted = cuda_workloads(source, target, Choices(precision=Precision("int8")))
    there = prebuilt(target, "int8")
    (first,) = (one for one in wanted.counts if one.output.dtype == "int8")
    (template,) = takers(first, target, CUTLASS_TEMPLATES)
    assert any(template.digest(first, one, target) in there for one in template.candidates(first, target))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "90a", "100a"])
def test_there_is_a_plan_for_every_dtype_that_an_architecture_multiplies(arch, dtype):
    target = CudaTarget.typical(arch)
    planned = plan(target, ("gemm", "attention"), (dtype,))
    lacking = (arch == "75" and dtype == "bf16") or (arch == "100a" and dtype not in ("f16", "bf16"))
    assert bool(planned) != lacking
    for one in planned:
        assert one.candidate in one.template.candidates(one.workload, target)
