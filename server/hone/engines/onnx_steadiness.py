"""Does a model do the same work for all inputs of the same shapes?

An execution that another thread waits for (the event loop) must not suddenly take a thousand times as long. Loops, and
operators that take a size from a tensor's items (Range, Expand, Resize, ...), let whoever sends a request choose how
much there is to do; so only graphs of operators count that are known not to, and that their inputs' shapes bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hone.engines.protobuf import Malformed, contents_of, fields

# Field numbers of ONNX's messages (part of the format).
_MODEL_GRAPH, _MODEL_FUNCTIONS, _GRAPH_NODE = 7, 25, 1
_NODE_OPERATOR, _NODE_DOMAIN = 4, 7

_ELEMENTWISE = """
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil
    Celu Clip Cos Cosh DequantizeLinear Div Dropout DynamicQuantizeLinear Elu Equal Erf Exp Floor Gelu Greater
    GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul
    Neg Not Or PRelu Pow QuantizeLinear Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt
    Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor
"""
_MOVING = """
    Concat Constant DepthToSpace Flatten Gather GatherElements GatherND Reshape ReverseSequence ScatterElements
    ScatterND Shape Size Slice SpaceToDepth Split Squeeze Transpose Trilu Unsqueeze
"""
_REDUCING = """
    ArgMax ArgMin AveragePool CumSum GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool ReduceL1 ReduceL2
    ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare TopK
"""
_NORMALISING = """
    BatchNormalization GroupNormalization Hardmax InstanceNormalization LRN LayerNormalization LogSoftmax
    LpNormalization MeanVarianceNormalization RMSNormalization Softmax
"""
_MULTIPLYING = """
    Conv ConvInteger ConvTranspose Einsum GRU Gemm LSTM MatMul MatMulInteger QLinearConv QLinearMatMul RNN
"""
_LEARNING = """
    ArrayFeatureExtractor Binarizer FeatureVectorizer Imputer LinearClassifier LinearRegressor Normalizer OneHotEncoder
    SVMClassifier SVMRegressor Scaler TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor
"""
_STANDARD = frozenset(" ".join((_ELEMENTWISE, _MOVING, _REDUCING, _NORMALISING, _MULTIPLYING)).split())
#: By domain.
STEADY_OPERATORS = {"": _STANDARD, "ai.onnx": _STANDARD, "ai.onnx.ml": frozenset(_LEARNING.split())}


def has_steady_operators(path: Path) -> bool:
    """Whether each node of a model's file is of `STEADY_OPERATORS`; False for a file that is no model, and for models
    with functions of their own. Raises OSError."""
    try:
        return all(name in STEADY_OPERATORS.get(domain, ()) for domain, name in _operators(contents_of(path)))
    except (Malformed, UnicodeDecodeError):
        return False


def _operators(model: memoryview) -> Iterator[tuple[str, str]]:
    """Domain and name of each node, and something that is no operator for each function. Raises Malformed."""
    for number, value in fields(model):
        if number == _MODEL_FUNCTIONS:
            yield "", ""
        if number == _MODEL_GRAPH and isinstance(value, memoryview):
            for inner, node in fields(value):
                if inner == _GRAPH_NODE and isinstance(node, memoryview):
                    yield _operator(node)


def _operator(node: memoryview) -> tuple[str, str]:
    domain = name = ""
    for number, value in fields(node):
        if number == _NODE_OPERATOR and isinstance(value, memoryview):
            name = str(value, "utf-8")
        elif number == _NODE_DOMAIN and isinstance(value, memoryview):
            domain = str(value, "utf-8")
    return domain, name
