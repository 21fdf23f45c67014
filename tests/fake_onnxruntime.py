"""A session of ONNX Runtime that stands for one with the CUDA provider: it computes on the CPU what lies in the memory
of a card that is not there (`fake_cuda.LazyCudart`)."""

from __future__ import annotations

import ctypes

import numpy as np

from hone.engines.onnxruntime import make_session


class Value:
    """An output on the card, whose memory goes to others when nobody holds it."""

    def __init__(self, array):
        self._array = np.array(array, copy=True)

    def data_ptr(self):
        return self._array.ctypes.data

    def shape(self):
        return list(self._array.shape)

    def __del__(self):
        self._array.reshape(-1).view(np.uint8)[:] = 0xEE


class Binding:
    def __init__(self, session):
        self.session = session
        self.inputs, self.outputs, self.values = {}, [], []
        self.num_bound = 0

    def clear_binding_inputs(self):
        self.inputs.clear()

    def bind_input(self, name, device, ordinal, element, shape, address):
        assert (device, ordinal) == ("cuda", self.session.ordinal)
        self.inputs[name] = (element, tuple(shape), address)
        self.num_bound += 1

    def clear_binding_outputs(self):
        self.outputs, self.values = [], []

    def bind_output(self, name, device, ordinal):
        assert (device, ordinal) == ("cuda", self.session.ordinal)
        assert not self.values, "it would write into the values of the run before"
        self.outputs.append(name)

    def get_outputs(self):
        return list(self.values)


class Session:
    """The CUDA provider's: `stream` is what it launches on."""

    def __init__(self, path, cudart, ordinal, stream):
        self.real = make_session(path, 0, 1)
        self.cudart, self.ordinal, self.stream = cudart, ordinal, stream
        self.num_inside = self.num_plain = 0
        self.fails = None
        self.bindings = []

    def __getattr__(self, name):
        return getattr(self.real, name)

    def compute(self, names, inputs):
        return self.real.run(names, inputs)

    def io_binding(self):
        self.bindings.append(Binding(self))
        return self.bindings[-1]

    def run(self, names, inputs, options=None):
        self.num_plain += 1
        return self.real.run(names, inputs)

    def run_with_iobinding(self, binding):
        self.num_inside += 1
        assert self.num_inside == 1, "one thread at a time"
        assert self.cudart.device == self.ordinal
        try:
            if self.fails is not None:
                self.fails()
            self.cudart.finish(self.stream)
            inputs = {}
            for name, (element, shape, address) in binding.inputs.items():
                assert any(start <= address < start + block.nbytes for start, block in self.cudart.allocated.items())
                dtype = np.dtype(np.uint16 if element == 16 else element)
                data = ctypes.string_at(address, int(np.prod(shape)) * dtype.itemsize)
                inputs[name] = np.frombuffer(data, dtype).reshape(shape)
            binding.values = [Value(array) for array in self.compute(binding.outputs, inputs)]
        finally:
            self.num_inside -= 1
